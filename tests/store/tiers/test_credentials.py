from __future__ import annotations

from pathlib import Path

import pytest

from hearth.core.errors import ConfigError
from hearth.store.tiers.credentials import AccessKeys, find_s3_access

CREDENTIALS = """
[default]
aws_access_key_id = default-id
aws_secret_access_key = secret%of/default

[work]
aws_access_key_id = work-id
aws_secret_access_key = work-secret
aws_session_token = work-token
"""
CONFIG = """
[default]
region = eu-west-1
s3 =
  max_concurrent_requests = 20

[profile work]
region = eu-north-1
endpoint_url = http://127.0.0.1:9000

[profile signed-on]
sso_session = rig

[profile halved]
aws_access_key_id = halved-id
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """An environment that names two files of profiles and nothing else."""
    (tmp_path / "credentials").write_text(CREDENTIALS, encoding="utf-8")
    (tmp_path / "config").write_text(CONFIG, encoding="utf-8")
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }


def test_the_default_profile_gives_keys_and_region(files: dict[str, str]) -> None:
    access = find_s3_access(files)
    assert access.signer.keys == AccessKeys("default-id", "secret%of/default", None)
    assert (access.region, access.endpoint) == ("eu-west-1", None)


def test_a_named_profile_is_put_together_from_both_files(files: dict[str, str]) -> None:
    access = find_s3_access(files | {"AWS_PROFILE": "work"})
    assert access.signer.keys == AccessKeys("work-id", "work-secret", "work-token")
    assert (access.region, access.endpoint) == ("eu-north-1", "http://127.0.0.1:9000")


def test_files_are_looked_for_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(CREDENTIALS, encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_s3_access({}).signer.keys == AccessKeys("default-id", "secret%of/default", None)


def test_keys_of_the_environment_win_over_those_of_files_as_a_whole(files: dict[str, str]) -> None:
    environ = {"AWS_PROFILE": "work", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}
    assert find_s3_access(files | environ).signer.keys == AccessKeys("id", "secret", None)


def test_region_and_endpoint_of_the_environment_win_over_those_of_files(files: dict[str, str]) -> None:
    environ = {"AWS_PROFILE": "work", "AWS_REGION": "us-west-2", "AWS_ENDPOINT_URL": "https://s3.example"}
    access = find_s3_access(files | environ)
    assert (access.region, access.endpoint) == ("us-west-2", "https://s3.example")


def test_keys_that_the_client_can_fetch_win_over_those_of_files(files: dict[str, str]) -> None:
    signer = find_s3_access(files | {"AWS_WEB_IDENTITY_TOKEN_FILE": "token"}).signer
    assert signer.keys is None
    assert not signer.is_anonymous
    assert "AWS_WEB_IDENTITY_TOKEN_FILE" in signer.who


def test_without_any_keys_requests_are_not_signed_and_it_says_where_keys_were_looked_for(
    tmp_path: Path,
) -> None:
    nowhere = str(tmp_path / "none")
    signer = find_s3_access({"AWS_SHARED_CREDENTIALS_FILE": nowhere, "AWS_CONFIG_FILE": nowhere}).signer
    assert signer.is_anonymous
    assert signer.keys is None
    assert "AWS_ACCESS_KEY_ID" in signer.who
    assert nowhere in signer.who


def test_requests_are_not_signed_when_the_environment_asks_for_that(files: dict[str, str]) -> None:
    signer = find_s3_access(files | {"AWS_SKIP_SIGNATURE": "true"}).signer
    assert signer.is_anonymous
    assert signer.keys is None


def test_a_profile_that_is_in_no_file_is_refused_with_those_that_are(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"`wrok`.*default, halved, signed-on, work"):
        find_s3_access(files | {"AWS_PROFILE": "wrok"})


def test_a_profile_whose_keys_must_be_obtained_is_refused_with_the_command_that_does(
    files: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match=r"`sso_session`.*export-credentials"):
        find_s3_access(files | {"AWS_PROFILE": "signed-on"})


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_a_key_in_the_environment_is_refused(files: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match="set both or neither"):
        find_s3_access(files | {name: "half"})


def test_half_a_key_in_a_profile_is_refused(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no `aws_secret_access_key`"):
        find_s3_access(files | {"AWS_PROFILE": "halved"})


def test_a_file_that_is_not_one_of_profiles_is_refused_by_name(files: dict[str, str]) -> None:
    Path(files["AWS_CONFIG_FILE"]).write_text("region: eu-west-1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config` cannot be read"):
        find_s3_access(files)


def test_an_endpoint_without_scheme_is_refused(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="given: `localhost:9000`"):
        find_s3_access(files | {"AWS_ENDPOINT_URL": "localhost:9000"})


def test_secrets_do_not_show_when_printed(files: dict[str, str]) -> None:
    shown = repr(find_s3_access(files | {"AWS_PROFILE": "work"}))
    assert "work-id" in shown
    assert "work-secret" not in shown
    assert "work-token" not in shown
