"""What every test needs before PyTorch multiplies for the first time."""

import os

# Some virtual machines report AMX and have none that works: PyTorch's own product of two bfloat16 matrices ends by SIGILL there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
