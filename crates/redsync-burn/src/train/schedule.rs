//! Learning rates: in comes how far the training is, out goes the rate.

/// How the learning rate changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Not at all.
    Constant,
    /// A tenth from half of the training on, a hundredth from three quarters on.
    Step,
    /// Along half a cosine down to zero.
    Cosine,
    /// A quarter whenever the validation got no better in an epoch.
    Plateau,
}

impl Schedule {
    /// The names of all schedules.
    pub const NAMES: [&str; 4] = ["constant", "step", "cosine", "plateau"];

    /// The schedule of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Schedule::Constant, Schedule::Step, Schedule::Cosine, Schedule::Plateau]
            .into_iter()
            .find(|known| known.name() == name)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::Constant => "constant",
            Schedule::Step => "step",
            Schedule::Cosine => "cosine",
            Schedule::Plateau => "plateau",
        }
    }
}

/// The learning rate of a training.
#[derive(Clone, Debug, PartialEq)]
pub struct Pace {
    /// The rate before any change.
    pub rate: f64,
    /// How it changes.
    pub schedule: Schedule,
    /// Steps in which it grows linearly from nothing.
    pub warm_up: u64,
    /// Steps in all.
    pub steps: u64,
    /// What a plateau left of it, and the best validation loss so far.
    pub plateau: (f64, f64),
}

impl Pace {
    /// A pace at its beginning.
    pub fn new(rate: f64, schedule: Schedule, warm_up: u64, steps: u64) -> Self {
        Pace { rate, schedule, warm_up, steps, plateau: (1.0, f64::INFINITY) }
    }

    /// The rate of a step.
    ///
    /// ```
    /// use redsync_burn::train::{Pace, Schedule};
    /// let pace = Pace::new(0.1, Schedule::Cosine, 10, 110);
    /// assert!((pace.at(0) - 0.01).abs() < 1e-6);
    /// assert!((pace.at(10) - 0.1).abs() < 1e-6);
    /// assert!((pace.at(60) - 0.05).abs() < 1e-6);
    /// ```
    pub fn at(&self, step: u64) -> f32 {
        if step < self.warm_up {
            return (self.rate * (step + 1) as f64 / self.warm_up as f64) as f32;
        }
        let done = (step - self.warm_up) as f64 / self.steps.saturating_sub(self.warm_up).max(1) as f64;
        let factor = match self.schedule {
            Schedule::Constant => 1.0,
            Schedule::Step if done < 0.5 => 1.0,
            Schedule::Step if done < 0.75 => 0.1,
            Schedule::Step => 0.01,
            Schedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos()),
            Schedule::Plateau => self.plateau.0,
        };
        (self.rate * factor) as f32
    }

    /// An epoch ended with this validation loss.
    pub fn judge(&mut self, loss: f64) {
        let (factor, best) = &mut self.plateau;
        if loss < *best {
            *best = loss;
        } else {
            *factor /= 4.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_schedule_falls_at_one_half_and_three_quarters() {
        let pace = Pace::new(1.0, Schedule::Step, 0, 100);
        assert_eq!([pace.at(49), pace.at(50), pace.at(74), pace.at(75)], [1.0, 0.1, 0.1, 0.01]);
    }

    #[test]
    fn a_plateau_quarters_the_rate_only_when_nothing_got_better() {
        let mut pace = Pace::new(20.0, Schedule::Plateau, 0, 100);
        for (loss, rate) in [(6.0, 20.0), (5.0, 20.0), (5.0, 5.0), (4.0, 5.0), (4.5, 1.25)] {
            pace.judge(loss);
            assert_eq!(pace.at(7), rate);
        }
    }
}
