"""A file system of our own that can lose power.

In:    a folder for its image
Out:   a mounted ext4; after `lose_power` in a run and `mount_again` here, what a disk would hold
Keeps: the machine as it was: unmounted at the end, whatever happened
"""

import os
import subprocess
import time
from pathlib import Path

import pytest

from .sweep import tool

IMAGE_BYTES = 32 << 20


class Ext4:
    """An image, loop-mounted while the block runs."""

    def __init__(self, scratch: Path) -> None:
        self._image = scratch / "ext4.img"
        self.mount_point = scratch / "ext4"

    def __enter__(self) -> "Ext4":
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        subprocess.run([tool("mkfs.ext4"), "-q", "-F", str(self._image)], check=True)
        self.mount_point.mkdir()
        if os.geteuid() != 0:
            pytest.skip("a power loss needs root, to mount an ext4 image")
        done = self._mount()
        if done.returncode:
            pytest.skip(f"this machine does not allow loop mounts: {done.stderr.strip()}")
        return self

    def __exit__(self, *error: object) -> None:
        if os.path.ismount(self.mount_point):
            self._unmount()
        self.mount_point.rmdir()
        self._image.unlink()

    def mount_again(self) -> None:
        """What a machine does when the power is back."""
        self._unmount()
        done = self._mount()
        assert done.returncode == 0, done.stderr

    def _mount(self) -> "subprocess.CompletedProcess[str]":
        # commit=300: the journal is not written by the clock while a point is being tried
        options = ["-t", "ext4", "-o", "loop,commit=300"]
        command = [tool("mount"), *options, str(self._image), str(self.mount_point)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def _unmount(self) -> None:
        deadline = time.monotonic() + 10
        command = [tool("umount"), str(self.mount_point)]
        while (done := subprocess.run(command, capture_output=True, text=True)).returncode:
            assert time.monotonic() < deadline, f"could not unmount: {done.stderr}"
            time.sleep(0.05)
