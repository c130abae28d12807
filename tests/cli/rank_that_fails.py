"""A rank whose training does what the environment says: end well, raise, die, or find a fault."""

import os
import signal
import sys
import time
from types import ModuleType

from megatron_meds.cli import rank
from megatron_meds.config import Settings, SettingsError


def train(settings: Settings) -> None:
    if os.environ["HOW"] == "well":
        threads = os.environ["OMP_NUM_THREADS"]
        sys.stdout.write(f"rank {os.environ['RANK']} threads {threads} steps {settings.run.steps}\n")
        return
    if os.environ["HOW"] == "sleep":
        sys.stdout.write("ready\n")
        sys.stdout.flush()
    if os.environ["RANK"] == "0" or os.environ["HOW"] == "sleep":
        time.sleep(60)
    if os.environ["HOW"] == "raise":
        raise RuntimeError("the reason why")
    if os.environ["HOW"] == "fault":
        raise SettingsError(["data.train.0: row 7 has no answer"])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    stand_in = ModuleType("megatron_meds.train")
    stand_in.train = train
    sys.modules["megatron_meds.train"] = stand_in
    rank.main()
