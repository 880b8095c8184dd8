"""megastable's guard, for any training loop: judges every update before it is made, and rewinds in host memory.

`Guard` and `SkippableSampler` need torch; everything else numpy and pydantic only.
"""

from typing import TYPE_CHECKING, Any

from megastable_guard.guard_config import DetectorConfig, GuardConfig, PolicyConfig

if TYPE_CHECKING:
    from megastable_guard.loop_guard import Guard, StepVerdict
    from megastable_guard.sampler import SkippableSampler

__version__ = "0.1.0"
__all__ = [
    "DetectorConfig", "Guard", "GuardConfig", "PolicyConfig", "SkippableSampler", "StepVerdict", "__version__",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__]


def __getattr__(name: str) -> Any:
    """Imported when asked for: torch takes seconds, and who judges recorded numbers needs none of it."""
    if name in ("Guard", "StepVerdict"):
        from megastable_guard import loop_guard

        return getattr(loop_guard, name)
    if name == "SkippableSampler":
        from megastable_guard.sampler import SkippableSampler

        return SkippableSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
