"""A certificate of nobody's authority, for servers of tests that speak https as `localhost`."""

import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """(key, certificate) in `folder`, valid for two days. Skips the test where openssl is not installed."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    try:
        made = subprocess.run(
            [*command.split(), "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("openssl, which makes the certificate, is not installed")
    assert made.returncode == 0, made.stderr
    return key, cert
