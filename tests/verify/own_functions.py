"""Grading functions of a user, named in the tests by import path. They run in grading processes."""

import os
import sys
import time

import numpy as np

NOT_A_FUNCTION = 3


def says_yes(response: str, gold: str) -> bool:
    return gold in response


def numpy_bool(response: str, gold: str) -> np.bool_:
    return np.bool_(gold in response)


def behaves_as_told(response: str, gold: str) -> bool:
    if response == "loop":
        while True:
            pass
    if response == "sleep":
        time.sleep(1000)
    if response == "exit":
        os._exit(3)
    if response == "quit":
        sys.exit(0)
    if response == "raise":
        raise KeyError("no such thing")
    if response == "hoard":
        return len(bytearray(8 << 30)) > 0
    if response == "score":
        return 0.7  # type: ignore[return-value]
    if response == "print":
        print("a user's print must not disturb the answers")
    return response == gold
