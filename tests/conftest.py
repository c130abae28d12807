"""What every test may ask for. Each fixture lives in a plugin file of its own."""

pytest_plugins = ["tests.fixtures_ranks", "tests.fixtures_tiny", "tests.fixtures_vllm"]
