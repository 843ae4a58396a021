"""Where S3 is and who asks, from the environment and the files that every S3 tool reads. Sends nothing.

The client library reads the environment but no files, and where it finds no keys it asks the metadata
service of an EC2 instance, which anywhere else is seconds of silence. So this is the order, and the first
that is there decides:

    AWS_SKIP_SIGNATURE                       requests are not signed
    AWS_ACCESS_KEY_ID and its secret         these keys
    one of DELEGATES                         the client fetches keys from there, the metadata service included
    the profile AWS_PROFILE, or `default`    the keys in ~/.aws/credentials or ~/.aws/config
    nothing                                  requests are not signed, which is right for public buckets

Region and endpoint come from the environment, else from the profile.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hearth.core.errors import ConfigError

DELEGATES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_METADATA_ENDPOINT",
)
OBTAINED = ("credential_process", "role_arn", "sso_session", "sso_start_url")


@dataclass(frozen=True, slots=True)
class AccessKeys:
    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Signer:
    who: str  #: for messages that say who was refused
    keys: AccessKeys | None = None  #: None: the client fetches them itself, or needs none
    is_anonymous: bool = False


@dataclass(frozen=True, slots=True)
class S3Access:
    signer: Signer
    region: str | None
    endpoint: str | None


def find_s3_access(environ: Mapping[str, str]) -> S3Access:
    """Raises ConfigError where profiles, or the keys that they should give, are incomplete."""
    profile = _read_profile(environ)
    region = _first(environ, "AWS_REGION", "AWS_DEFAULT_REGION")
    endpoint = _first(environ, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = endpoint or profile.entries.get("endpoint_url")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"the endpoint of S3 must begin with `http://` or `https://`, given: `{endpoint}`")
    return S3Access(_find_signer(environ, profile), region or profile.entries.get("region"), endpoint)


def _find_signer(environ: Mapping[str, str], profile: _Profile) -> Signer:
    if environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes", "on"):
        return Signer("a request without signature, as AWS_SKIP_SIGNATURE asks", is_anonymous=True)
    if environ.get("AWS_ACCESS_KEY_ID") or environ.get("AWS_SECRET_ACCESS_KEY"):
        return Signer("the key in AWS_ACCESS_KEY_ID", _keys_of_environment(environ))
    if delegate := next((name for name in DELEGATES if environ.get(name)), None):
        return Signer(f"the keys fetched through {delegate}")
    if profile.entries.get("aws_access_key_id"):
        return Signer(f"the key of {profile.where}", _keys_of_profile(profile))
    if obtained := next((name for name in OBTAINED if name in profile.entries), None):
        raise ConfigError(
            f"{profile.where} has `{obtained}` and no `aws_access_key_id`; Hearth reads keys and "
            "does not obtain them: export them with `aws configure export-credentials --format env`"
        )
    return Signer(
        f"a request without signature, for there is no key in AWS_ACCESS_KEY_ID and none in {profile.where}",
        is_anonymous=True,
    )


@dataclass(frozen=True, slots=True)
class _Profile:
    where: str  #: its name and its files, for messages
    entries: Mapping[str, str]


def _read_profile(environ: Mapping[str, str]) -> _Profile:
    credentials = os.path.expanduser(environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")
    config = os.path.expanduser(environ.get("AWS_CONFIG_FILE") or "~/.aws/config")
    name = environ.get("AWS_PROFILE") or "default"
    where = f"profile `{name}` of `{credentials}` and `{config}`"
    in_config, in_credentials = _sections(config), _sections(credentials)
    found = [in_config.get(f"profile {name}"), in_config.get(name), in_credentials.get(name)]
    if environ.get("AWS_PROFILE") and not any(section is not None for section in found):
        names = sorted({section.removeprefix("profile ") for section in [*in_config, *in_credentials]})
        raise ConfigError(f"AWS_PROFILE: there is no {where}; profiles found: {', '.join(names) or 'none'}")
    return _Profile(where, {key: value for section in found if section for key, value in section.items()})


def _sections(path: str) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None)  # a secret may hold a percent sign
    try:
        parser.read(path, encoding="utf-8")  # a file that does not exist reads as an empty one
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{path}` cannot be read as a file of AWS profiles: {error}") from error
    return {name: dict(parser.items(name)) for name in parser.sections()}


def _keys_of_environment(environ: Mapping[str, str]) -> AccessKeys:
    key_id, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    if not key_id or not secret:
        raise ConfigError(
            "only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set; set both or neither"
        )
    return AccessKeys(key_id, secret, environ.get("AWS_SESSION_TOKEN"))


def _keys_of_profile(profile: _Profile) -> AccessKeys:
    secret = profile.entries.get("aws_secret_access_key")
    if not secret:
        raise ConfigError(f"{profile.where} has `aws_access_key_id` and no `aws_secret_access_key`; add it")
    return AccessKeys(profile.entries["aws_access_key_id"], secret, profile.entries.get("aws_session_token"))


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)
