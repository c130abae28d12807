"""The policy that learns: Megatron-Core model, score pass and update.

Imports none of its modules on its own. It only keeps Megatron-Core's messages about what is not
installed here, or no longer advised, out of a run's output; each is expected and named below.
"""

import logging
import warnings

# Import-time notes that transformer-engine and apex are absent: `model.attention` decides on that.
warnings.filterwarnings(
    "ignore", message=r"Transformer Engine and Apex are not installed", category=UserWarning
)
warnings.filterwarnings("ignore", message=r"Apex is not installed. Falling back", category=UserWarning)
# A docstring of megatron-core 0.19 holds an unescaped backslash; seen when its files are compiled.
warnings.filterwarnings(
    "ignore", message=r".*invalid escape sequence", category=SyntaxWarning, module=r".*megatron"
)
# torch's newer names of two collectives that megatron-core 0.19 calls by their older ones.
warnings.filterwarnings(
    "ignore",
    message=r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    category=FutureWarning,
)

# megatron-core imports its multi-modal settings beside everything else.
warnings.filterwarnings("ignore", message=r"MimoModelConfig is experimental", category=UserWarning)


def _without(logger: str, text: str) -> None:
    """Drop the records of one logger whose message holds `text`."""
    logging.getLogger(logger).addFilter(lambda record: text not in record.getMessage())


# The announcement that HybridModel will one day take GPTModel's place.
_without("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED")
# torch's extension builder looks for a CUDA tool-kit that a machine without a GPU need not have.
_without("torch.utils.cpp_extension", "No CUDA runtime is found")
# DDP works the layout of its gradient buffers out by itself, as `actor/learning.py` wants it.
_without("megatron.core.distributed.distributed_data_parallel", "full_param_layout not provided")
