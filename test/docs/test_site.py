"""The documentation site."""

import shutil
import subprocess
import sys

from markdown_pages import ROOT


def test_site_is_built_in_a_fresh_checkout(tmp_path):
    """The first build of a checkout succeeds: it finds the package that its own hook links."""
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".*", "build", "build-*", "dist", "__pycache__", "*.pte")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (checkout / "build" / "docs" / "python-api.html").exists()
