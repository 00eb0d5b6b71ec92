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


def sign(folder: Path, authority: tuple[Path, Path], days: int = 2) -> tuple[Path, Path]:
    """(key, certificate) in `folder`, signed by an authority of `make_certificate`; of fewer than 0 days: expired."""
    key, cert, asked = folder / "key.pem", folder / "cert.pem", folder / "asked.pem"
    new = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=client"
    subprocess.run([*new.split(), "-keyout", key, "-out", asked], capture_output=True, check=True)
    by = ["-CA", authority[1], "-CAkey", authority[0], "-CAcreateserial", "-days", str(days)]
    subprocess.run(["openssl", "x509", "-req", "-in", asked, *by, "-out", cert], capture_output=True, check=True)
    return key, cert
