"""A server that demands a client certificate: probes and load show it, one sentence where it is missing or wrong."""

import contextlib
import select
import socket
import ssl
import subprocess
import threading

import pytest

from llm_bench import probe, targets
from llm_bench.errors import BenchError, TargetError
from llm_bench.targets import Target
from tests.bench import command, environment, good, llm_server, rows, trace_file
from tests.certificates import make_certificate
from tests.scripted import Scripted, http_response


@contextlib.contextmanager
def in_front_of(server, folder, authority, version=None, says_why=True):
    """(port, certificate) of a TLS server that hands all to `server` once a client has one that `authority` signed.

    `says_why`: by an alert, as OpenSSL sends it; those of asyncio close without a word.
    """
    key, cert = make_certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = version or ssl.TLSVersion.MAXIMUM_SUPPORTED
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def talk(client):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=True)
        with client:
            client.settimeout(10)
            shaken = False
            with contextlib.suppress(OSError):
                while not shaken:
                    try:
                        tls.do_handshake()
                        shaken = True
                    except ssl.SSLWantReadError:
                        client.sendall(outgoing.read())
                        incoming.write(client.recv(1 << 16) or b"")
                    except ssl.SSLError:
                        if says_why:
                            client.sendall(outgoing.read())
                            client.shutdown(socket.SHUT_WR)
                            while client.recv(1 << 16):  # or unread data would end in a reset that overtakes the alert
                                pass
                        return
                with socket.create_connection(("127.0.0.1", server.port)) as behind:
                    pump(tls, incoming, outgoing, client, behind)

    def pump(tls, incoming, outgoing, client, behind):
        while True:
            client.sendall(outgoing.read())
            with contextlib.suppress(ssl.SSLWantReadError):
                while data := tls.read(1 << 16):
                    behind.sendall(data)
            ready, _, _ = select.select([client, behind], [], [], 10)
            if not ready:
                return
            for one in ready:
                data = one.recv(1 << 16)
                if not data:
                    return
                if one is client:
                    incoming.write(data)
                else:
                    tls.write(data)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True))
                threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    yield listener.getsockname()[1], cert
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in [accepting, *threads]:
        thread.join(5)


HOW = {
    "TLS 1.3": (ssl.TLSVersion.TLSv1_3, True),
    "TLS 1.2": (ssl.TLSVersion.TLSv1_2, True),
    "TLS 1.3, no alert": (ssl.TLSVersion.TLSv1_3, False),
    "TLS 1.2, no alert": (ssl.TLSVersion.TLSv1_2, False),
}


@pytest.fixture(params=HOW)
def demanding(request, tmp_path):
    """(target without a certificate, ours, another one that nobody vouches for)."""
    for name in ("ours", "others", "theirs"):
        (tmp_path / name).mkdir()
    ours, others = (make_certificate(tmp_path / name) for name in ("ours", "others"))
    with (
        Scripted(llm_server(lambda number, seen: good(seen))) as server,
        in_front_of(server, tmp_path / "theirs", ours[1], *HOW[request.param]) as (port, cert),
    ):
        yield Target("t", f"https://localhost:{port}/v1", cafile=str(cert)), ours, others


def refused(target):
    with pytest.raises(TargetError) as caught:
        probe.probe(target, lambda text: None, 1.0)
    said = str(caught.value)
    assert said.startswith(f"target t: {target.url}")
    assert "\n" not in said
    return said


def shown(target, pair, **facts):
    key, cert = pair
    return Target("t", target.url, cafile=target.cafile, cert=str(cert), key=str(key), **facts)


def test_a_certificate_is_shown_and_its_lack_is_one_sentence(demanding, request):
    target, ours, others = demanding
    silent = "no alert" in request.node.name
    assert probe.probe(shown(target, ours), lambda text: None, 10.0).model == "m"
    assert targets.reachable(shown(target, ours))
    if silent:
        assert "it closes without a word, as where a client certificate is asked for: `cert`" in refused(target)
        assert (
            "it closes without a word, as where the client certificate of `cert` is not one of its authority's, or has"
            in refused(shown(target, others))
        )
    else:
        assert ": it asks for a client certificate; name its files by `cert` and `key`" in refused(target)
        assert ": it refused the client certificate of `cert` (" in refused(shown(target, others))


PAGES = ("No required SSL certificate was sent", "The SSL certificate error")  # nginx's


@pytest.mark.parametrize(
    ("cert", "page", "said"), [("", PAGES[0], "asks for a client"), ("c", PAGES[1], "refused the cl")]
)
def test_a_page_that_wants_a_certificate(cert, page, said):
    text = f"<html>\r\n<head><title>400 {page}</title></head>\r\n<body>nginx</body></html>".encode()
    with Scripted([(0, http_response(400, text, {"Content-Type": "text/html"}))]) as server:
        assert said in refused(Target("t", server.url, cert=cert))


def test_key_and_certificate_may_be_one_file(demanding, tmp_path):
    target, (key, cert), _ = demanding
    both = tmp_path / "both.pem"
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    one = Target("t", target.url, cafile=target.cafile, cert=str(both))
    assert probe.probe(one, lambda text: None, 10.0).model == "m"


def test_a_run_shows_it_by_targets_toml(demanding, tmp_path):
    target, (key, cert), _ = demanding
    (tmp_path / "targets.toml").write_text(
        f'[targets.t]\nurl = "{target.url}"\ncafile = "{target.cafile}"\ncert = "{cert}"\nkey = "{key}"\n'
    )
    trace = trace_file(tmp_path, rows(8))
    asked = command(
        "run", "--targets", "t", "--trace", str(trace), "--concurrency", "2", "--workers", "1", "--out", "out"
    )
    done = subprocess.run(
        asked, capture_output=True, text=True, timeout=180, cwd=tmp_path, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "targets.toml").write_text(f'[targets.t]\nurl = "{target.url}"\ncafile = "{target.cafile}"\n')
    asked = command("targets", "check", "t", "--ready-timeout", "1")
    done = subprocess.run(
        asked, capture_output=True, text=True, timeout=180, cwd=tmp_path, env=environment(), check=False
    )
    assert done.returncode == 4
    assert "client certificate" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"cert": "no-such.pem"}, "its client certificate cannot be used .the file of `cert`: no such file"),
        ({"cert": "/etc/hostname"}, "cannot be used .no certificate in the file of `cert`.* PEM files that belong"),
        ({"cert": "CERT"}, "cannot be used .no private key in the file of `cert`"),
        ({"key": "sk-secret-1234"}, "`key` without `cert`: .* named by key_env"),
        ({"cert": "x", "url": "http://h"}, "`cert` is for https"),
        ({"cert": "CERT", "key": "OTHER"}, r"cannot be used .key values mismatch"),
        ({"cert": "CERT", "key": "sk-secret-1234"}, "cannot be used .the file of `key`: no such file"),
        ({"cert": "CERT", "key": "LOCKED"}, "cannot be used .its key has a password"),
    ],
)
def test_files_that_are_none_are_refused_and_a_key_is_not_repeated(facts, said, tmp_path):
    (tmp_path / "a").mkdir()
    key, cert = make_certificate(tmp_path)
    locked = tmp_path / "locked.pem"
    lock = ["openssl", "ec", "-aes128", "-passout", "pass:word", "-in", str(key), "-out", str(locked)]
    subprocess.run(lock, check=True, capture_output=True)
    files = {"CERT": cert, "OTHER": make_certificate(tmp_path / "a")[0], "LOCKED": locked}
    given = {name: str(files.get(value, value)) for name, value in facts.items()}
    with pytest.raises(BenchError, match=said) as caught:
        targets.parse(f"t={given.pop('url', 'https://h/v1')}", tmp_path / "none.toml", given)
    assert "secret" not in str(caught.value)
