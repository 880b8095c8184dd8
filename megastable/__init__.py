"""megastable: a GPT pretraining stack, on DeepSpeed, that keeps itself sane."""

import sys
from pathlib import Path

__version__ = "0.1.0"

# In a checkout the two other packages lie beside this one. Those of an installed megastable may be older.
_BESIDE = Path(__file__).resolve().parents[1]
if (_BESIDE / "guard/megastable_guard").is_dir():
    sys.path += [
        str(_BESIDE / folder) for folder in ("guard", "tools") if str(_BESIDE / folder) not in sys.path
    ]
