"""Make `.venv` with nothing but a Python, and install wazn into it; called by `scripts/setup`.

The system's Python is never installed into, so one that refuses `pip install` is fine. A Python without
`ensurepip` (Debian without python3-venv) gets pip from PyPI, checked against the published digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
WHAT = {"use": ".", "test": ".[test]"}
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
PIP = "https://pypi.org/pypi/pip/json"


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else "use"
    if wanted not in WHAT:
        stop(f"`{wanted}` is not one of {', '.join(WHAT)}")
    if is_done(wanted):
        return
    say(f"setting up .venv to {wanted} wazn ({'minutes' if wanted == 'test' else 'seconds'}, once)")
    if not works(PYTHON):
        make_venv()
    pip_install("--constraint", "constraints.txt", *cpu_wheels(wanted), "--editable", WHAT[wanted])
    stamp(wanted).write_text(fingerprint())


def is_done(wanted: str) -> bool:
    stamps = [stamp(name) for name in WHAT if name in (wanted, "test")]
    return works(PYTHON) and any(s.exists() and s.read_text() == fingerprint() for s in stamps)


def stamp(wanted: str) -> Path:
    return VENV / f"wazn-{wanted}.stamp"


def fingerprint() -> str:
    """What the install depends on: where the checkout lies and what it asks for."""
    told = [
        str(ROOT),
        *((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")),
    ]
    return hashlib.sha256("\0".join(told).encode()).hexdigest()


def works(python: Path) -> bool:
    check = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    try:
        return (
            subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0
        )
    except OSError:
        return False


def make_venv() -> None:
    shutil.rmtree(VENV, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", VENV], capture_output=True, check=False)
    if made.returncode == 0 and works(PYTHON):
        return
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", VENV], check=True)
        with tempfile.TemporaryDirectory() as folder:
            wheel = fetch_pip(Path(folder))
            subprocess.run([PYTHON, wheel / "pip", "install", "--quiet", wheel], check=True)
    except (OSError, subprocess.CalledProcessError, StopIteration, ValueError) as error:
        shutil.rmtree(VENV, ignore_errors=True)
        stop(
            f"no virtual environment can be made with {sys.executable} ({error})",
            "install its venv module (Debian and Ubuntu: apt install python3-venv) and try again",
        )


def fetch_pip(folder: Path) -> Path:
    with urllib.request.urlopen(PIP, timeout=30) as answer:
        files = json.load(answer)["urls"]
    file = next(file for file in files if file["packagetype"] == "bdist_wheel")
    with urllib.request.urlopen(urljoin(PIP, file["url"]), timeout=120) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != file["digests"]["sha256"]:
        raise ValueError("pip's wheel does not have the published digest")
    wheel = folder / str(file["filename"])
    wheel.write_bytes(content)
    return wheel


def cpu_wheels(wanted: str) -> list[str]:
    """The tests need torch but no CUDA, whose wheels weigh gigabytes: take PyTorch's own index if it answers."""
    if wanted != "test":
        return []
    try:
        with urllib.request.urlopen(f"{CPU_WHEELS}/torch/", timeout=5):
            return ["--extra-index-url", CPU_WHEELS]
    except OSError:
        return []


def pip_install(*arguments: str) -> None:
    environment = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [PYTHON, "-m", "pip", "install", "--quiet", *arguments]
    if subprocess.run(
        command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False
    ).returncode:
        stop("pip could not install wazn; its reason is above")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def stop(text: str, hint: str | None = None) -> None:
    say(f"error: {text}")
    if hint:
        say(f"hint: {hint}")
    sys.exit(1)


if __name__ == "__main__":
    main()
