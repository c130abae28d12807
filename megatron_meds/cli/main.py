"""The command line. Console script `megatron-meds`."""
