"""Settings of verification."""

from pydantic import Field

from megatron_meds.section import Section


class VerifySettings(Section):
    workers: int = Field(default=2, ge=1)
    """Processes that grade answers, per replica head."""
    timeout_seconds: float = Field(default=5.0, gt=0)
    """Wall clock an answer may take; then its worker is killed, the verdict is wrong, and it is counted."""
    memory_mib: int | None = Field(default=4096, ge=512)
    """Address space of a grading process, MiB; None: no limit, for a `function` that needs more (CUDA)."""
    function: str | None = None
    """`module:name` of your own `(response: str, gold: str) -> bool`, run in the same workers."""
