"""What is installed: its version is the workspace's, its licences come along, and docs/python.md says what its docstrings say."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import subprocess
import sys

import redsync

PROJECT = pathlib.Path(__file__).resolve().parents[3]


def test_one_version_for_crates_and_package():
    workspace = (PROJECT / "Cargo.toml").read_text()
    version = re.search(r'^\[workspace\.package\]\nversion = "(.+)"$', workspace, re.MULTILINE)
    assert version is not None
    assert redsync.__version__ == version[1]
    assert importlib.metadata.version("redsync-torch") == version[1]
    # A registry knows no paths: what one crate wants of another is this version.
    ours = re.findall(r"^redsync-\w+ = .*$", workspace, re.MULTILINE)
    assert ours and all(f'version = "{version[1]}"' in line for line in ours), ours


def test_the_licences_are_in_the_package():
    about = importlib.metadata.metadata("redsync-torch")
    assert about["License-Expression"] == "MIT OR Apache-2.0"
    assert sorted(about.get_all("License-File") or []) == ["LICENSE-APACHE", "LICENSE-MIT"]


def test_the_reference_says_what_the_docstrings_say():
    made = subprocess.run([sys.executable, PROJECT / "lab" / "python-reference.py"], capture_output=True, text=True, check=True)
    assert made.stdout == (PROJECT / "docs" / "python.md").read_text(), "run: lab/python-reference.py >docs/python.md"
