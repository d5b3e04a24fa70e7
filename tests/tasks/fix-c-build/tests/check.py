"""Builds /app/main.c and /app/tide.c afresh, and compares it and the agent's /app/tide with a model in Python."""

import random
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

BUILD = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"]


def answer(heights: list[int], times: list[str]) -> str:
    longest = run = 1
    for before, after in pairwise(heights):
        run = run + 1 if after > before else 1
        longest = max(longest, run)
    high, low = heights.index(max(heights)), heights.index(min(heights))
    return (
        f"readings {len(heights)}\nhighest {heights[high]} at {times[high]}\n"
        f"lowest {heights[low]} at {times[low]}\nrise {longest}\n"
    )


def cases() -> list[list[int]]:
    rng = random.Random(20310407)
    many = [[rng.randrange(-300, 900) for _ in range(size)] for size in (2, 9, 40, 333, 1200)]
    return [[5], [-4], [1, 2, 3, 4], [7, 7, 7], [300, 120, 120, 300], [9, 3, 4, 5, 4, 5, 6, 7], *many]


def right(program: Path) -> bool:
    for heights in cases():
        times = [f"{n // 60 % 24:02}:{n % 60:02}" for n in range(len(heights))]
        text = "".join(f"{time} {height}\n" for time, height in zip(times, heights, strict=True))
        done = subprocess.run([program], input=text, capture_output=True, text=True, timeout=5)
        if done.returncode != 0 or done.stdout != answer(heights, times):
            print(f"FAILED: {program} on {len(heights)} readings: exit {done.returncode}, {done.stdout[:200]!r}")
            return False
    return True


with tempfile.TemporaryDirectory() as folder:
    rebuilt = Path(folder, "tide")
    built = subprocess.run([*BUILD, rebuilt, "/app/main.c", "/app/tide.c"], timeout=30).returncode == 0
    sys.exit(0 if built and right(rebuilt) and right(Path("/app/tide")) else 1)
