"""Installs torch 2.13 into this environment where pip offers it as a CPU build; does nothing elsewhere.

A CUDA build is several GB that no test here needs, so it is left alone: tests that want torch then skip.
"""

import json
import platform
import subprocess
import sys

VERSION = "2.13.0"


def offered_version() -> str | None:
    """The version, local part included, that pip would install."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--ignore-installed",
               "--report", "-", f"torch=={VERSION}"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        return None
    return json.loads(result.stdout)["install"][0]["metadata"]["version"]


def main() -> None:
    version = offered_version()
    if version is None:
        print(f"torch {VERSION}: not offered for this Python; tests that need it will skip")
    elif "+cpu" not in version and platform.system() != "Darwin":
        print(f"torch {version}: not a CPU build; tests that need it will skip")
    else:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"torch=={VERSION}"], check=True)
        print(f"torch {version} installed")


if __name__ == "__main__":
    main()
