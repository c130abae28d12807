"""The rows of tools/gpu_check.py: what each checks, in a form for one GPU and a small one for the CPU."""
