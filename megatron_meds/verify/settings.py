"""Settings of verification."""

from typing import Literal

from pydantic import Field

from megatron_meds.section import Section


class VerifySettings(Section):
    workers: int = Field(default=2, ge=1)
    """Processes that grade answers, per replica head."""
    timeout_seconds: float = Field(default=5.0, gt=0)
    """Wall clock an answer may take; then its worker is killed, the verdict is wrong, and it is counted."""
    memory_mib: int | None = Field(default=4096, ge=512)
    """Address space of a grading process, MiB; None: no limit, for a `function` that needs more (CUDA)."""
    unparsed: Literal["refuse", "text"] = "refuse"
    """Reference answers that math-verify cannot parse: `refuse` ends the run at load time, naming the rows;
    `text` warns, and an answer is right where it reads the same."""
    function: str | None = None
    """`module:name` of your own `(response: str, gold: str) -> bool`, run in the same workers."""
