from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bench import bad_server
from bench.bad_server import BadServer, Behaviour
from hearth.core.errors import BadCheckpoint, ChunkMissing, ConfigError, Unreachable
from hearth.store.tiers.remote import RemoteModel, Retry
from tests.store.s3_server import S3Server, free_ports

CALM = Retry(num_tries=3, first_delay_s=0.01, max_delay_s=0.02)
#: Bears no silence, but a machine that others use. A whole request may take longer, so that what ends a
#: stall is seen to be the silence.
HASTY = replace(CALM, stall_s=1.5)
SILENT = (bad_server.is_silent, bad_server.stalls_in_the_body)
#: How long a test waits for HASTY to give up: three silences, two pauses and a slow machine
GIVES_UP_S = 60.0

WEIGHTS = random.Random(3).randbytes(5_000_017)


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a developer has configured plays no part."""
    for name in (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"),
        *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_SKIP_SIGNATURE"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.fixture
def server() -> Iterator[BadServer]:
    with bad_server.serve({"/m/weights.bin": WEIGHTS, "/m/manifest.json": b"{}"}) as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a model in a bucket that the environment gives access to."""
    s3.bucket("models").put("some/model/weights.bin", WEIGHTS)
    s3.bucket("models").put("some/model/manifest.json", b"{}")
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return "s3://models/some/model"


def retry_for(behaviour: Behaviour) -> Retry:
    """Bear silence where something else ends a request, or it might be what ends it on a busy machine."""
    return HASTY if behaviour in SILENT else CALM


def read(model: RemoteModel, offset: int, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    model.read_into(offset, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.e2e
class TestS3:
    def test_reads_what_was_stored(self, bucket: str) -> None:
        model = RemoteModel(bucket + "/", CALM)
        assert read(model, 0, len(WEIGHTS)) == WEIGHTS
        assert model.read_file("manifest.json") == b"{}"

    @pytest.mark.parametrize(
        ("offset", "num_bytes"), [(0, 1), (1, 4096), (4095, 1_048_577), (5_000_016, 1), (17, 0)]
    )
    def test_reads_any_range(self, bucket: str, offset: int, num_bytes: int) -> None:
        assert read(RemoteModel(bucket, CALM), offset, num_bytes) == WEIGHTS[offset : offset + num_bytes]

    def test_threads_read_and_count_at_once(self, bucket: str) -> None:
        model = RemoteModel(bucket, CALM)
        offsets = range(0, 4_000_000, 100_000)
        with ThreadPoolExecutor(4) as pool:
            pieces = list(pool.map(lambda offset: read(model, offset, 100_000), offsets))
        assert b"".join(pieces) == WEIGHTS[:4_000_000]
        assert model.counters.num_requests == len(offsets)
        assert model.counters.num_bytes == 4_000_000

    def test_keys_may_come_from_a_profile(
        self, bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        keys = s3.environment
        for name in keys:
            monkeypatch.delenv(name)
        (tmp_path / "credentials").write_text(
            f"[tests]\naws_access_key_id={keys['AWS_ACCESS_KEY_ID']}\n"
            f"aws_secret_access_key={keys['AWS_SECRET_ACCESS_KEY']}\nendpoint_url={s3.endpoint}\n",
            encoding="utf-8",
        )
        monkeypatch.setenv("AWS_PROFILE", "tests")
        assert read(RemoteModel(bucket, CALM), 3, 1000) == WEIGHTS[3:1003]

    @pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
    def test_a_wrong_key_is_refused_at_once(
        self, bucket: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, "wrong")
        model = RemoteModel(bucket, CALM)
        with pytest.raises(Unreachable, match=r"weights.bin` is refused: 403 .*the key in AWS_ACCESS_KEY_ID"):
            read(model, 0, 10)
        assert (model.counters.num_requests, model.counters.num_retries) == (1, 0)

    def test_without_keys_the_refusal_says_where_they_were_looked_for(
        self, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(Unreachable, match=r"403 .*without signature.* AWS_ACCESS_KEY_ID .*credentials"):
            read(RemoteModel(bucket, CALM), 0, 10)

    def test_a_missing_object_is_reported_at_once(self, bucket: str) -> None:
        model = RemoteModel(bucket, CALM)
        with pytest.raises(ChunkMissing, match=r"s3://models/some/model/other.json` does not exist"):
            model.read_file("other.json")
        assert model.counters.num_requests == 1

    def test_a_missing_bucket_is_reported_at_once(self, bucket: str) -> None:
        model = RemoteModel(bucket.replace("models", "no-models"), CALM)
        with pytest.raises(ChunkMissing, match="NoSuchBucket"):
            read(model, 0, 10)
        assert model.counters.num_requests == 1

    @pytest.mark.parametrize("offset", [len(WEIGHTS) - 5, len(WEIGHTS) + 5])
    def test_an_object_that_is_too_short_is_reported_at_once(self, bucket: str, offset: int) -> None:
        model = RemoteModel(bucket, CALM)
        with pytest.raises(ChunkMissing, match="ends too early"):
            read(model, offset, 10)
        assert model.counters.num_requests == 1

    def test_a_signed_url_is_read_without_credentials_until_it_expires(
        self, bucket: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        head = RemoteModel(bucket, CALM)
        for name in s3.environment:
            monkeypatch.delenv(name)
        lasting, short = (signed(head.signed_url(valid_s)) for valid_s in (600.0, 1.0))
        assert read(lasting, 4095, 70_001) == WEIGHTS[4095 : 4095 + 70_001]
        assert not lasting.was_refused
        time.sleep(2.5)
        with pytest.raises(Unreachable, match="refused was a presigned URL, which may have expired"):
            read(short, 0, 10)
        assert short.was_refused

    def test_without_credentials_nothing_is_signed(
        self, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "1")
        with pytest.raises(Unreachable, match=r"no URL of .* can be signed: .*AWS_SKIP_SIGNATURE"):
            RemoteModel(bucket, CALM).signed_url(60.0)


def signed(url: str) -> RemoteModel:
    where, _, signature = url.partition("?")
    return RemoteModel(where.removesuffix("/weights.bin"), CALM, signature)


def test_a_signature_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    (port,) = free_ports(1)
    with pytest.raises(Unreachable, match=rf"http://127.0.0.1:{port}/m/weights.bin") as told:
        read(signed(f"http://127.0.0.1:{port}/m/weights.bin?X-Amz-Signature=secret"), 0, 10)
    assert "secret" not in str(told.value) + caplog.text


class TestHttp:
    def test_reads_ranges_and_whole_files(self, server: BadServer) -> None:
        model = RemoteModel(f"{server.url}/m", CALM)
        assert read(model, 4095, 70_001) == WEIGHTS[4095 : 4095 + 70_001]
        assert model.read_file("manifest.json") == b"{}"
        assert server.asked == ["bytes=4095-74095", ""]
        assert model.counters.num_bytes == 70_003

    def test_a_file_that_is_too_large_is_not_fetched(self, server: BadServer) -> None:
        model = RemoteModel(f"{server.url}/m", CALM)
        with pytest.raises(BadCheckpoint, match=r"manifest\.json` is too large, limit: 1 bytes, given: 2"):
            model.read_file("manifest.json", max_bytes=1)
        assert (model.counters.num_requests, model.counters.num_bytes) == (1, 0)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "behaviour",
        [
            bad_server.hangs_up,
            bad_server.is_silent,
            bad_server.stalls_in_the_body,
            bad_server.cuts_the_body,
            bad_server.promises_too_little,
            bad_server.serves_another_range,
            pytest.param(bad_server.says(500), id="says_500"),
            pytest.param(bad_server.says(503), id="says_503"),
            pytest.param(bad_server.says(429), id="says_429"),
        ],
    )
    def test_a_fault_that_passes_is_retried(self, server: BadServer, behaviour: Behaviour) -> None:
        server.plan.extend([behaviour, behaviour])
        model = RemoteModel(f"{server.url}/m", retry_for(behaviour))
        assert read(model, 11, 70_001) == WEIGHTS[11 : 11 + 70_001]
        assert (model.counters.num_requests, model.counters.num_retries) == (3, 2)
        assert len(server.asked) == 3

    @pytest.mark.slow
    def test_a_server_that_trickles_is_asked_no_longer_than_the_bytes_may_take(
        self, server: BadServer
    ) -> None:
        server.plan.extend([bad_server.trickles] * 3)
        retry = replace(HASTY, min_bytes_per_s=4 << 20)
        limit = r"it took \S+ s, limit: 1.75 s for 70001 bytes"
        with pytest.raises(Unreachable, match=f"tries: 1, the last: .*; {limit}"):
            read(RemoteModel(f"{server.url}/m", retry), 11, 70_001)
        assert len(server.asked) == 1, "a second request would be as slow"

    def test_large_reads_have_longer_than_small_ones(self) -> None:
        model = RemoteModel("http://127.0.0.1:1/m", Retry(stall_s=10.0, min_bytes_per_s=1 << 20))
        limits_s = [model._endpoint(num_bytes).limit_s for num_bytes in (1, 1 << 20, (1 << 20) + 1, 16 << 20)]
        assert limits_s == [11.0, 11.0, 12.0, 26.0]
        assert model._endpoint(16 << 20) is model._endpoint((8 << 20) + 1)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("behaviour", "reason"),
        [
            (bad_server.hangs_up, "error sending request"),
            (bad_server.is_silent, "Timeout"),
            (bad_server.stalls_in_the_body, "body error"),
            (bad_server.promises_too_little, "35000 bytes came, wanted: 70001"),
            pytest.param(bad_server.says(500), "500 Internal Server Error", id="says_500"),
        ],
    )
    def test_a_fault_that_stays_ends_in_bounded_time(
        self, server: BadServer, behaviour: Behaviour, reason: str
    ) -> None:
        server.plan.extend([behaviour] * 10)
        begin_s = time.monotonic()
        with pytest.raises(Unreachable, match=rf"/m/weights.bin` .*tries: 3, the last: .*{reason}"):
            read(RemoteModel(f"{server.url}/m", retry_for(behaviour)), 0, 70_001)
        assert time.monotonic() - begin_s < GIVES_UP_S
        assert len(server.asked) == 3

    def test_a_failed_read_leaves_the_buffer_alone(self, server: BadServer) -> None:
        server.plan.extend([bad_server.cuts_the_body] * 3)
        buffer = bytearray(b"x" * 1000)
        with pytest.raises(Unreachable):
            RemoteModel(f"{server.url}/m", CALM).read_into(0, memoryview(buffer))
        assert buffer == b"x" * 1000

    def test_a_server_that_ignores_ranges_is_refused_at_once(self, server: BadServer) -> None:
        server.plan.append(bad_server.ignores_ranges)
        with pytest.raises(Unreachable, match="came whole where a range was asked for"):
            read(RemoteModel(f"{server.url}/m", CALM), 0, 1000)
        assert len(server.asked) == 1

    @pytest.mark.parametrize("status", [400, 401, 403])
    def test_a_refusal_is_not_retried(self, server: BadServer, status: int) -> None:
        server.plan.append(bad_server.says(status))
        with pytest.raises(Unreachable, match=f"is refused: {status} "):
            RemoteModel(f"{server.url}/m", CALM).read_file("manifest.json")
        assert len(server.asked) == 1

    def test_a_missing_file_is_reported_at_once(self, server: BadServer) -> None:
        with pytest.raises(ChunkMissing, match=r"other/weights.bin` does not exist: 404"):
            read(RemoteModel(f"{server.url}/other", CALM), 0, 10)
        assert len(server.asked) == 1

    def test_bytes_of_the_right_number_are_delivered_unchecked(self, server: BadServer) -> None:
        server.plan.append(bad_server.flips_a_bit)
        assert read(RemoteModel(f"{server.url}/m", CALM), 0, 9) == bytes([WEIGHTS[0] ^ 1]) + WEIGHTS[1:9]

    def test_a_port_where_nobody_listens_is_unreachable(self) -> None:
        (port,) = free_ports(1)
        with pytest.raises(Unreachable, match=r"tries: 3, .*\(Connect\)"):
            RemoteModel(f"http://127.0.0.1:{port}/m", CALM).read_file("manifest.json")

    def test_every_retry_is_logged(self, server: BadServer, caplog: pytest.LogCaptureFixture) -> None:
        server.plan.append(bad_server.says(502))
        RemoteModel(f"{server.url}/m", CALM).read_file("manifest.json")
        (line,) = caplog.messages
        assert line.startswith(f"object_retry url={server.url}/m/manifest.json try=1 ")
        assert line.endswith("reason=502 Bad Gateway")


class TestUrl:
    @pytest.mark.parametrize("url", ["ftp://host/m", "/models/m", "s3://", "http:///m", "gs://bucket/m", ""])
    def test_what_is_no_object_storage_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigError, match=r"s3://bucket/prefix.*given: "):
            RemoteModel(url)

    @pytest.mark.parametrize("url", ["http://host:99999/m", "http://a b/m", "http://[::1/m"])
    def test_a_malformed_url_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigError, match="cannot be used"):
            RemoteModel(url)

    def test_a_password_in_a_url_is_refused_and_not_repeated(self) -> None:
        with pytest.raises(ConfigError, match="no password") as refusal:
            RemoteModel("https://user:hunter2@host/m")
        assert "hunter2" not in str(refusal.value)


class TestRetry:
    def test_pauses_double_up_to_a_limit_and_vary(self) -> None:
        delays_s = list(Retry(num_tries=5, first_delay_s=1.0, max_delay_s=3.0).delays_s())
        longest_s = [1.0, 2.0, 3.0, 3.0]
        assert all(
            longest / 2 <= delay <= longest for delay, longest in zip(delays_s, longest_s, strict=True)
        )
        assert delays_s[2] != delays_s[3]

    def test_one_try_has_no_pauses(self) -> None:
        assert list(Retry(num_tries=1).delays_s()) == []
