"""megastable: a GPT pretraining stack, on DeepSpeed, that keeps itself sane."""

import sys
from pathlib import Path

__version__ = "0.1.0"

# In a checkout the two other packages lie beside this one. They go before those of an installed megastable, which may
# be older.
_ROOT = Path(__file__).resolve().parents[1]
SIBLINGS = [str(_ROOT / folder) for folder in ("guard", "tools")]
if not (_ROOT / "guard/megastable_guard").is_dir():
    SIBLINGS = []
sys.path[:0] = [folder for folder in SIBLINGS if folder not in sys.path]
