"""What can go wrong. Every text is a sentence that says what, where and, as far as known, what to do."""


class Error(RuntimeError):
    """The base of every error of this package."""


class UsageError(Error, ValueError):
    """A call that cannot work: the model, the optimizer or a setting does not fit."""


class MismatchError(Error):
    """Ranks that do not run the same thing."""


class GradientError(Error):
    """A gradient that is not finite, or cannot be compressed, on this or another rank."""


class PeerError(Error):
    """Other ranks do not answer, or sent what cannot be used.

    Attributes:
        ranks: those ranks of the model's process group, as far as they are known.
    """

    def __init__(self, message: str, ranks: "tuple[int, ...]" = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
