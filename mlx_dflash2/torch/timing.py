"""Clocks that wait for the device."""

import time

import torch


def wait_for(device: torch.device) -> None:
    """Return when the device has done all it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_when_done(device: torch.device) -> float:
    """Seconds on a clock, read when the device has done all it was given."""
    wait_for(device)
    return time.perf_counter()
