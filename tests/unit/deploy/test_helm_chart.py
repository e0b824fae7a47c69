"""The chart as helm renders it: valid, strict about its values, and true to the program."""

import re
import shlex
import subprocess
import tomllib
from copy import deepcopy
from typing import Any

import pytest
import yaml
from support import manifests
from support.manifests import CHART, EXAMPLES, ROOT, Manifest, environment, one, pods

from stepfleet.orchestrator import Settings

MINIMAL: dict[str, Any] = {
    "image": {"repository": "r/f", "tag": "1"},
    "agents": "a",
    "redis": {"existingSecret": "s"},
}
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.yaml"))
CUSTOM = {"ScaledObject", "PodMonitor", "PrometheusRule", "ExternalSecret"}


def rendered(**values: Any) -> list[Manifest]:
    return manifests.manifests(manifests.helm_template(values={**MINIMAL, **values}))


@pytest.fixture(scope="module")
def minimal() -> list[Manifest]:
    return rendered()


@pytest.fixture(scope="module")
def production() -> list[Manifest]:
    return manifests.example("production")


# ------------------------------------------------------------------------------------- validity


@pytest.mark.parametrize("name", NAMES)
def test_helm_finds_no_fault_with_the_chart(name: str) -> None:
    """OPS-01"""
    linted = manifests.helm_run(
        "lint", "--strict", str(CHART), "-f", str(EXAMPLES / f"{name}.yaml")
    )
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("name", NAMES)
def test_what_is_rendered_fits_the_schemas(name: str) -> None:
    """OPS-01: of Kubernetes, KEDA, the Prometheus operator and External Secrets."""
    made = manifests.example(name)
    assert pods(made)
    for each in made:
        manifests.check_schema(each)


def test_the_examples_use_every_kind_of_custom_resource() -> None:
    assert {each["kind"] for name in NAMES for each in manifests.example(name)} >= CUSTOM


@pytest.mark.parametrize("name", NAMES)
def test_every_pod_keeps_to_the_restricted_standard(name: str) -> None:
    """OPS-01: and has no token of the cluster, and cannot write to its image."""
    for pod in pods(manifests.example(name)).values():
        assert manifests.breaches(pod) == []
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["resources"]["requests"]


def test_an_open_pod_would_be_found() -> None:
    assert manifests.breaches({"containers": [{"name": "c", "ports": [{"hostPort": 1}]}]}) == [
        "c: runAsNonRoot",
        "c: seccompProfile",
        "c: allowPrivilegeEscalation",
        "c: capabilities",
        "c: hostPort",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_manifest_names_is_there_or_the_users(name: str) -> None:
    """Services, budgets and scalers select what the release has; Secrets come from the values."""
    made = manifests.example(name)
    labels = [
        each["spec"]["template"]["metadata"]["labels"]
        for each in made
        if each["kind"] in {"Deployment", "StatefulSet"}
    ]
    for each in made:
        if each["kind"] in {"Service", "PodDisruptionBudget"}:
            select = each["spec"]["selector"]
            select = select.get("matchLabels", select)
            assert sum(select.items() <= own.items() for own in labels) == 1, each["metadata"]
        if each["kind"] == "ScaledObject":
            assert each["spec"]["scaleTargetRef"]["name"] in pods(made)
    given = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    secrets = {given["redis"]["existingSecret"], *given.get("providerSecrets", [])}
    secrets |= {given.get("flower", {}).get("existingSecret"), *given.get("envFromSecrets", [])}
    secrets |= {each["spec"]["target"]["name"] for each in made if each["kind"] == "ExternalSecret"}
    for pod in pods(made).values():
        named = [source["secretRef"]["name"] for source in pod["containers"][0].get("envFrom", [])]
        named += [
            value["secretKeyRef"]["name"]
            for value in environment(pod).values()
            if isinstance(value, dict)
        ]
        assert set(named) <= secrets


def test_the_charts_program_is_the_projects_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]


# --------------------------------------------------------------------------------- wrong values


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("image.repository", "", "image.repository: name the image"),
        ("image.tag", "", "image.tag: give the tag of your image"),
        ("agents", "", "agents: name the module"),
        ("redis.existingSecret", "", "redis.existingSecret: name a Secret"),
        ("redis.url", "redis://x", "'url' not allowed"),
        ("replica", 2, "'replica' not allowed"),
        ("drain", "20s", "/drain"),
        ("archive.url", "/var/archive", "/archive/url"),
        ("archive.url", "file:///archive", "archive.url: a folder needs archive.existingClaim"),
        ("archive.url", "s3://b/f?secret=x", "archive.url: its credentials would be readable"),
        ("archive.after", "1d", "/archive/after"),
        ("workers.default.slot", 5, "'slot' not allowed"),
        ("workers.default.slots", 0, "/workers/default/slots"),
        ("workers.default.pool", "gevent", "/workers/default/pool"),
        ("workers.default.pool", "prefork", "missing property 'slots'"),
        ("workers.default.queues", ["gpu"], "missing property 'slots'"),
        (
            "workers.default",
            {"replicas": 1, "autoscaling": {"max": 2}},
            "workers.default.autoscaling: take it away, or replicas",
        ),
        (
            "workers.default",
            {"autoscaling": {"min": 3, "max": 2}},
            "workers.default.autoscaling: min is 3, more than max, 2",
        ),
        ("workers.default", {"autoscaling": {"min": 1}}, "missing property 'max'"),
        ("workers.default", {"autoscaling": {"type": "hpa", "min": 0, "max": 2}}, "/min"),
        ("workers.Default", {}, "workers.Default: name a group with small letters"),
        ("flower.enabled", True, "flower.existingSecret: name a Secret"),
        ("flower.ingress.enabled", True, "flower.ingress.host: give the host"),
        ("flower.ingress.enabled", True, "flower.ingress.tlsSecret: name a Secret"),
        ("externalSecret.enabled", True, "externalSecret.store.name: name the store"),
        ("externalSecret.enabled", True, "externalSecret.key: name the entry"),
        ("config", "slots = 5\ndrain = 60\n", "config: drain is set by the value drain"),
        ("config", 'queue="work"', "config: queue is set by the value queue"),
        ("config", "redis_url = 'x'", "redis_url is set by the Secret of redis.existingSecret"),
        ("config", "broker_url = 'x'", "broker_url is set by a Secret among envFromSecrets"),
        ("config", "metrics_port = 1", "metrics_port is set by the chart (9464)"),
        ("config", "metrics_host = 'x'", "metrics_host is set by the chart (0.0.0.0)"),
        ("env.STEPFLEET_QUEUE", "work", "env: STEPFLEET_QUEUE is set by the value queue"),
        ("env.STEPFLEET_SLOTS", 5, "env: STEPFLEET_SLOTS is set by slots of a group"),
        ("env.STEPFLEET_AGENTS", "b", "env: STEPFLEET_AGENTS is set by the value agents"),
        (
            "workers.default.env.STEPFLEET_DRAIN",
            60,
            "workers.default.env: STEPFLEET_DRAIN is set by the value drain",
        ),
        (
            "flower.env.STEPFLEET_FLOWER_BASIC_AUTH",
            "me:secret",
            "flower.env: STEPFLEET_FLOWER_BASIC_AUTH is set by the Secret of flower.existingSecret",
        ),
        ("env.OPENAI_API_KEY", "k", "env: OPENAI_API_KEY would be readable in the release"),
        ("env.hf_token", "k", "use existingSecret/envFromSecrets"),
        ("workers.default.env.A_PASSWORD", "k", "workers.default.env: A_PASSWORD would be"),
        ("flower.env.A_SECRET", "k", "flower.env: A_SECRET would be"),
        ("redis.trial.image", "a\n- name: b", "/redis/trial/image"),
        ("podDisruptionBudget.maxUnavailable", "1: 2", "/podDisruptionBudget/maxUnavailable"),
        ("queue", "", "/queue"),
        ("networkPolicy.redisPorts", ["6379"], "/networkPolicy/redisPorts/0"),
        ("image.digest", "sha256:1", "/image/digest"),
        ("env", {"A-B": "1"}, "A-B"),
        (
            "workers",
            {"default": {"autoscaling": {"max": 2}}, "spot": {"autoscaling": {"max": 2}}},
            "workers.spot.autoscaling: workers.default scales on the same work",
        ),
        (
            "",
            {"keeper": {"enabled": False}, "workers": {"default": {"autoscaling": {"max": 2}}}},
            "set keeper.enabled",
        ),
        (
            "",
            {"keeper": {"replicas": 0}, "workers": {"default": {"autoscaling": {"max": 2}}}},
            "set keeper.replicas to 1 or more",
        ),
    ],
)
def test_a_wrong_value_is_refused_and_named(path: str, value: Any, said: str) -> None:
    """OPS-01"""
    values = deepcopy(MINIMAL)
    if path:
        *folders, last = path.split(".")
        inner = values
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = value
    else:
        values |= value
    refused = manifests.helm_run("template", "fleet", str(CHART), values=values)
    assert refused.returncode != 0
    assert said in refused.stderr


# ------------------------------------------------------------------------------ what pods are given


@pytest.mark.parametrize("name", NAMES)
def test_a_pod_outlives_its_drain_by_fifteen_seconds(name: str) -> None:
    """OPS-01"""
    workers = {key: pod for key, pod in pods(manifests.example(name)).items() if "-worker-" in key}
    assert workers
    for pod in workers.values():
        drain = int(environment(pod)["STEPFLEET_DRAIN"])
        assert pod["terminationGracePeriodSeconds"] == drain + 15


def test_a_group_drains_as_long_as_it_says() -> None:
    spot = pods(manifests.example("spot"))
    drains = {key: environment(pod).get("STEPFLEET_DRAIN") for key, pod in spot.items()}
    assert drains == {
        "fleet-stepfleet-keeper": None,
        "fleet-stepfleet-worker-default": "20",
        "fleet-stepfleet-worker-gpu": "600",
        "fleet-stepfleet-worker-spot": "15",
    }


def test_pods_roll_with_the_settings_and_with_nothing_else_but_their_own(
    minimal: list[Manifest],
) -> None:
    """Another stepfleet.toml replaces pods; another number of them does not."""

    def templates(made: list[Manifest]) -> dict[str, Any]:
        return {
            each["metadata"]["name"]: each["spec"]["template"]
            for each in made
            if each["kind"] == "Deployment"
        }

    before = templates(minimal)
    assert before == templates(rendered(workers={"default": {"replicas": 9}}))
    changed = templates(rendered(config="lease = 5\n"))
    assert changed.keys() == before.keys()
    assert all(changed[key] != before[key] for key in before)


def test_selectors_have_nothing_that_an_upgrade_changes(minimal: list[Manifest]) -> None:
    """A Deployment's selector is for good."""
    for each in minimal:
        if each["kind"] == "Deployment":
            select = each["spec"]["selector"]["matchLabels"]
            assert set(select) <= {
                "app.kubernetes.io/name",
                "app.kubernetes.io/instance",
                "app.kubernetes.io/component",
                "stepfleet/group",
            }
            assert each["metadata"]["labels"]["helm.sh/chart"]


def test_a_scaled_group_has_no_number_of_its_own(production: list[Manifest]) -> None:
    """OPS-02: KEDA divides `wanted` by 1 for each worker; the chart must not set another number."""
    scaled = one(production, "ScaledObject")["spec"]
    assert "replicas" not in one(production, "Deployment", "-worker-default")["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 20)
    (trigger,) = scaled["triggers"]
    keeper = one(production, "Service", "-keeper")
    port = keeper["spec"]["ports"][0]["port"]
    assert trigger["metricType"] == "AverageValue"
    assert trigger["metadata"] == {
        "url": f"http://{keeper['metadata']['name']}.agents.svc:{port}/scale",
        "valueLocation": "wanted",
        "targetValue": "1",
    }


def test_a_group_of_tools_scales_on_each_of_its_queues() -> None:
    """OPS-02"""
    group = {"queues": ["gpu", "a b"], "slots": 2, "autoscaling": {"max": 3}}
    triggers = one(rendered(workers={"tools": group}), "ScaledObject")["spec"]["triggers"]
    asked = [each["metadata"]["url"].partition("/scale")[2] for each in triggers]
    assert asked == ["?queue=gpu", "?queue=a+b"]


def test_without_keda_the_number_follows_the_works_metric() -> None:
    """OPS-02"""
    group = {"slots": 500, "autoscaling": {"type": "hpa", "min": 1, "max": 9}}
    made = rendered(workers={"default": group})
    scaler = one(made, "HorizontalPodAutoscaler")
    manifests.check_schema(scaler)
    (metric,) = scaler["spec"]["metrics"]
    assert metric["external"] == {
        "metric": {
            "name": "stepfleet_work",
            "selector": {"matchLabels": {"job": "agents.fleet-stepfleet", "queue": "stepfleet"}},
        },
        "target": {"type": "AverageValue", "averageValue": "500"},
    }
    assert environment(pods(made)["fleet-stepfleet-keeper"])["STEPFLEET_SLOTS"] == "500"


def test_a_metric_is_of_one_fleet_of_the_cluster(production: list[Manifest]) -> None:
    """OPS-02: the job that the monitor names is the one whose work the HPA selects."""
    hpa = {"type": "hpa", "min": 1, "max": 9}
    scaler = one(rendered(workers={"default": {"autoscaling": hpa}}), "HorizontalPodAutoscaler")
    selected = scaler["spec"]["metrics"][0]["external"]["metric"]["selector"]["matchLabels"]["job"]
    # As Kubernetes has values of labels.
    assert re.fullmatch(r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?", selected)
    for endpoint in one(production, "PodMonitor")["spec"]["podMetricsEndpoints"]:
        assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": selected}]
    elsewhere = manifests.helm_run("template", "fleet", str(CHART), "-n", "b", values={
        **MINIMAL, "workers": {"default": {"autoscaling": hpa}}})  # fmt: skip
    assert f'job: "{selected}"\n' not in elsewhere.stdout
    assert 'job: "b.fleet-stepfleet"\n' in elsewhere.stdout


def test_workers_that_are_there_anyway_are_not_wanted_twice() -> None:
    """OPS-02: the example's two steady workers are taken off what the spot group is to have."""
    made = manifests.example("spot")
    asked = {
        each["metadata"]["name"].rpartition("-")[2]: [
            one["metadata"]["url"].partition("/scale")[2] for one in each["spec"]["triggers"]
        ]
        for each in made
        if each["kind"] == "ScaledObject"
    }
    assert one(made, "Deployment", "-worker-default")["spec"]["replicas"] == 2
    assert asked == {"spot": ["?beside=2"], "gpu": ["?queue=gpu"]}


def test_steady_workers_count_for_the_queues_that_they_serve() -> None:
    """OPS-02: those of several groups are added up; a number that is not given is 2."""
    tools = {"queues": ["gpu", "cpu"], "slots": 1, "autoscaling": {"max": 9}}
    made = rendered(
        workers={
            "default": {},
            "a": {"replicas": 3, "queues": ["gpu"], "slots": 1},
            "b": {"queues": ["gpu", "own"], "slots": 1},
            "c": tools,
        }
    )
    triggers = one(made, "ScaledObject")["spec"]["triggers"]
    asked = [each["metadata"]["url"].partition("/scale")[2] for each in triggers]
    assert asked == ["?queue=gpu&beside=5", "?queue=cpu"]


def test_slots_of_the_settings_hold_for_workers_keeper_and_hpa() -> None:
    """OPS-01: a worker's option would hide them."""
    scaled = {"default": {"autoscaling": {"type": "hpa", "max": 9}}}
    made = rendered(workers=scaled, config="slots = 2_00 # few\n[limits.a]\nslots = 7\n")
    for pod in pods(made).values():
        assert "--slots" not in pod["containers"][0]["args"]
        assert "STEPFLEET_SLOTS" not in environment(pod)
    (metric,) = one(made, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["external"]["target"]["averageValue"] == "200"


def test_a_settings_name_within_a_table_is_no_setting() -> None:
    made = rendered(config="lease = 5\n[limits.drain]\ndrain = 1\nqueue = 'x'\n")
    assert one(made, "ConfigMap")


def test_metrics_that_the_chart_leaves_alone_are_the_users() -> None:
    made = rendered(metrics={"enabled": False}, config="metrics_port = 0\n")
    assert "metrics_port = 0" in one(made, "ConfigMap")["data"]["stepfleet.toml"]


def test_all_pods_and_the_hpa_have_the_queue_of_the_values() -> None:
    hpa = {"autoscaling": {"type": "hpa", "max": 9}}
    flower = {"enabled": True, "existingSecret": "f"}
    made = rendered(queue="work", workers={"default": hpa}, flower=flower)
    assert len(pods(made)) == 3
    assert {environment(pod)["STEPFLEET_QUEUE"] for pod in pods(made).values()} == {"work"}
    (metric,) = one(made, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["external"]["metric"]["selector"]["matchLabels"]["queue"] == "work"


def test_a_group_has_volumes_and_flower_has_variables_of_its_own() -> None:
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    group = {"volumes": [volume], "volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    viewers = {"STEPFLEET_FLOWER_VIEWERS": '["*@example.com"]'}
    flower = {"enabled": True, "existingSecret": "f", "env": viewers}
    made = rendered(workers={"default": group, "other": {}}, flower=flower)
    for each in made:
        manifests.check_schema(each)
    found = pods(made)
    has = {name for name, pod in found.items() if volume in pod["volumes"]}
    mounts = found["fleet-stepfleet-worker-default"]["containers"][0]["volumeMounts"]
    assert has == {"fleet-stepfleet-worker-default"}
    assert mounts[-1]["mountPath"] == "/data"
    knows = {name for name, pod in found.items() if viewers.items() <= environment(pod).items()}
    assert knows == {"fleet-stepfleet-flower"}


def test_numbers_stay_numbers_and_names_are_settings() -> None:
    made = rendered(env={"STEPFLEET_CACHE_BYTES": 268435456, "STEPFLEET_FLOWER_CONTENT": False})
    worker = environment(pods(made)["fleet-stepfleet-worker-default"])
    assert worker["STEPFLEET_CACHE_BYTES"] == "268435456"
    assert worker["STEPFLEET_FLOWER_CONTENT"] == "false"
    settings = {f"STEPFLEET_{name.upper()}" for name in Settings.model_fields}
    assert {name for name in worker if name.startswith("STEPFLEET_")} <= settings


def test_keys_of_models_are_for_workers_only(production: list[Manifest]) -> None:
    given = {
        name: [each["secretRef"]["name"] for each in pod["containers"][0].get("envFrom", [])]
        for name, pod in pods(production).items()
    }
    assert given == {
        "fleet-stepfleet-worker-default": ["signing", "fleet-stepfleet-providers"],
        "fleet-stepfleet-keeper": ["signing"],
        "fleet-stepfleet-flower": ["signing"],
    }


def test_all_containers_have_the_archive_and_its_secret(production: list[Manifest]) -> None:
    """OPS-05: keepers and workers move runs there, and Flower reads them."""
    for pod in pods(production).values():
        assert environment(pod)["STEPFLEET_ARCHIVE_URL"] == "s3://my-bucket/fleet"
        assert (
            Settings(archive_after=environment(pod)["STEPFLEET_ARCHIVE_AFTER"]).archive_after
            == 3600
        )
    archive = {"url": "file:///archive/f", "existingSecret": "keys", "existingClaim": "disk"}
    flower = {"enabled": True, "existingSecret": "f"}
    made = pods(rendered(archive=archive, flower=flower))
    assert len(made) == 3
    for pod in made.values():
        (container,) = pod["containers"]
        assert {"name": "archive", "mountPath": "/archive"} in container["volumeMounts"]
        claims = [
            one["persistentVolumeClaim"] for one in pod["volumes"] if one["name"] == "archive"
        ]
        assert claims == [{"claimName": "disk"}]
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    for pod in pods(rendered()).values():
        assert not [name for name in environment(pod) if "ARCHIVE" in name]


def test_the_settings_of_the_examples_are_settings(production: list[Manifest]) -> None:
    toml = one(production, "ConfigMap")["data"]["stepfleet.toml"]
    read = Settings(**tomllib.loads(toml))
    assert "openai:*" in read.limits


def test_redis_is_trusted_by_the_file_that_its_address_names(production: list[Manifest]) -> None:
    """The example's address names the place at which the authority's Secret is mounted."""
    for pod in pods(production).values():
        mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        assert mounts["redis-ca"] == "/etc/stepfleet/redis-ca"
    text = (EXAMPLES / "production.yaml").read_text()
    assert "ssl_ca_certs=/etc/stepfleet/redis-ca/ca.crt" in text


def test_the_redis_for_trials_has_the_configuration_of_all_others() -> None:
    made = manifests.example("trial")
    files = one(made, "ConfigMap", "-redis")["data"]
    for name, text in files.items():
        assert text == (ROOT / "deploy" / name).read_text()
    assert environment(pods(made)["fleet-stepfleet-worker-default"])["STEPFLEET_REDIS_URL"] == (
        "redis://stepfleet:$(REDIS_PASSWORD)@fleet-stepfleet-redis:6379/0"
    )


def test_the_rules_are_those_of_the_file(production: list[Manifest]) -> None:
    """OPS-06: there is one source of alerts."""
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())
    assert one(production, "PrometheusRule")["spec"] == rules


def test_one_job_has_the_metrics_of_the_whole_fleet(production: list[Manifest]) -> None:
    """OPS-06: the monitor selects every port with metrics."""
    monitor = one(production, "PodMonitor")["spec"]
    scraped = {each["port"] for each in monitor["podMetricsEndpoints"]}
    selected = monitor["selector"]["matchLabels"]
    served = set()
    for each in production:
        if each["kind"] == "Deployment" and "flower" not in each["metadata"]["name"]:
            template = each["spec"]["template"]
            assert selected.items() <= template["metadata"]["labels"].items()
            served |= {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert scraped == served


def test_pods_can_reach_what_they_need_only(production: list[Manifest]) -> None:
    policy = one(production, "NetworkPolicy")["spec"]
    (way_out,) = policy["egress"]
    assert [each["port"] for each in way_out["ports"]] == [53, 53, 443, 6379]
    (way_in,) = policy["ingress"]
    ports = {
        port["containerPort"]
        for pod in pods(production).values()
        for port in pod["containers"][0]["ports"]
    }
    assert {each["port"] for each in way_in["ports"]} == ports


def test_the_notes_say_how_to_look_at_the_release() -> None:
    made = manifests.helm_run(
        "install", "fleet", str(CHART), "--dry-run=client", "-n", "agents",
        "-f", str(EXAMPLES / "trial.yaml"),
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    notes = made.stdout.partition("NOTES:")[2]
    assert "deployment/fleet-stepfleet-worker-default -- stepfleet doctor" in notes
    assert "a lost disk loses every run" in notes


def test_a_packed_chart_has_the_linked_files_in_it(tmp_path: Any) -> None:
    """OPS-01: links lead out of the chart; an archive must not need what they lead to."""
    packed = manifests.helm_run("package", str(CHART), "-d", str(tmp_path))
    assert packed.returncode == 0, packed.stderr
    (archive,) = tmp_path.iterdir()
    listed = subprocess.run(["tar", "-tvzf", archive], capture_output=True, text=True, check=True)
    lines = [line for line in listed.stdout.splitlines() if "/files/" in line]
    assert len(lines) == 3
    assert all(line.startswith("-") and int(line.split()[2]) > 0 for line in lines)


def test_the_pages_command_installs_the_chart() -> None:
    """OPS-01"""
    page = (CHART.parent / "README.md").read_text()
    (block,) = re.findall(r"^helm (install .+?)^```", page, re.MULTILINE | re.DOTALL)
    words = shlex.split(block.replace("\\\n", "").replace("deploy/helm/stepfleet", str(CHART)))
    made = manifests.helm_run(*words, "--dry-run=client")
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize("folder", ["helm", "kubernetes"])
def test_the_links_of_the_pages_lead_somewhere(folder: str) -> None:
    page = ROOT / "deploy" / folder / "README.md"
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert links
    assert [one for one in links if not (page.parent / one).exists()] == []
