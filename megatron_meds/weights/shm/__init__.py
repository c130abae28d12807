"""Weights through shared memory: the transport between an actor and servers on CPUs of one machine.

The actor's ranks write tensors into buckets of an anonymous memory file, each rank its own part; the
receiver, a vLLM weight-transfer engine that every vLLM worker loads as a plug-in, maps the same pages
and loads them. What travels over HTTP is the list of tensors, once, and then "bucket k is there".
Importing this package imports neither torch nor vLLM.
"""

BACKEND = "shm"
"""What the engine is called in `--weight-transfer-config`."""


def register() -> None:
    """Make the engine known to vLLM (entry point of group `vllm.general_plugins`).

    vLLM may call it several times in a process.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "megatron_meds.weights.shm.receiver", "ShmWeightTransferEngine"
        )
