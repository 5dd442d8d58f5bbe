"""The real huggingface_hub client, in its own processes, against a loopback Hub: publish, list, load, fail, retry."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hub_server import HubServer, Repo
from PIL import Image

import timm_knapsack as tk  # before timm
from timm_knapsack.models.pruned_models import TIMM_WEIGHTS

import timm  # isort: skip
from safetensors.torch import save  # isort: skip

CARDS = Path(__file__).resolve().parents[2] / "model_cards"  # current, says test_model_card
EXECUTED = ["resnet50_knapsack_2g", "ecaresnet50d_knapsack_pruned", "efficientnet_b1_knapsack_pruned"]

START = """
import json, os, sys, urllib.request
sys.path.insert(0, os.environ["PROJECT"])
import torch
torch.set_num_threads(1)
import timm_knapsack as tk
import timm
import huggingface_hub.utils._http as http
http.time.sleep = lambda seconds: None  # the client waits 23 s before it gives up on a dead server

said = {}
def step(name, function):
    try:
        said[name] = function()
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
"""

PUBLISH = """
from huggingface_hub import HfApi
token, folders = os.environ["TOKEN"], os.environ["FOLDERS"]
push = tk.push_to_hub
def post(path):
    urllib.request.urlopen(urllib.request.Request(os.environ["HF_ENDPOINT"] + path, method="POST")).read()

step("no token", lambda: str(push(f"{folders}/first", "org/net")))
step("bad token", lambda: str(push(f"{folders}/first", "org/net", token="bad")))
step("first", lambda: push(f"{folders}/first", "org/net", token=token, tag="v1").url)
step("list", lambda: sorted(HfApi(token=token).list_repo_files("org/net")))
step("again", lambda: push(f"{folders}/second", "org/net", token=token).url)
step("same again", lambda: push(f"{folders}/second", "org/net", token=token).url)
step("tag taken", lambda: str(push(f"{folders}/second", "org/net", token=token, tag="v1")))
step("branch", lambda: push(f"{folders}/first", "org/net", token=token, revision="dev").url)
step("private", lambda: push(f"{folders}/first", "org/secret", private=True, token=token).url)
step("foreign", lambda: str(push(f"{folders}/first", "other/net", token=token)))
step("short name", lambda: push(f"{folders}/first", "short", token=token).repo_id)
os.environ["HF_TOKEN"] = token  # the usual place
for at in ("PUT", "/commit/"):
    post(f"/test/die/{at.strip('/')}")
    step(f"dies at {at}", lambda: str(push(f"{folders}/third", "org/net")))
    step(f"after {at}", lambda: HfApi().model_info("org/net").sha) if at == "PUT" else None
    post("/test/die/never")
step("retry", lambda: push(f"{folders}/third", "org/net").url)
step("models", lambda: sorted(model.id for model in HfApi().list_models()))
step("models without token", lambda: sorted(model.id for model in HfApi(token=False).list_models()))
import timm_knapsack.hub.patience as patience
slept = []
patience.time = type("Time", (), {"sleep": slept.append})
for at, status, after, times in (("create", 429, 7, 1), ("commit", 503, "none", 2), ("tag", 500, 1, 3)):
    post(f"/test/busy/{at}/{status}/{after}/{times}")
    step(f"busy {at}", lambda: push(f"{folders}/first", "org/busy", tag=f"v{status}").url)
    said[f"slept {at}"] = slept[:]
    slept.clear()
for after, times in ((0, 9), (9999, 1)):
    post(f"/test/busy/commit/503/{after}/{times}")
    step(f"busy for good, {after}", lambda: push(f"{folders}/first", "org/busy").url)
    said[f"slept {after}"] = slept[:]
    slept.clear()
    post("/test/busy/x/503/0/1")
import traceback
secrets = {"newline": token + chr(10), "inner newline": "hf_abc" + chr(10) + "def", "strange": "hf_abc" + chr(233)}
for name, secret in {**secrets, "empty": "", "unknown": "hf_abcdef"}.items():
    try:
        said[name] = push(f"{folders}/first", "org/busy", token=secret).repo_id
    except Exception:
        said[name] = traceback.format_exc().replace(chr(10), ' | ')
print(json.dumps(said))
"""

LOAD = """
expected = torch.load(os.environ["EXPECTED"], weights_only=True)
def which(name, **kwargs):
    model = timm.create_model(name, pretrained=True, **kwargs).eval()
    with torch.no_grad():
        output = model(expected["image"])
    return [key for key, value in expected.items() if key != "image" and torch.equal(value, output)]

step("main", lambda: which("hf-hub:org/net"))
step("tag", lambda: which("hf-hub:org/net@v1"))
step("branch", lambda: which("hf-hub:org/net@dev"))
step("commit", lambda: which("hf-hub:org/net@" + os.environ["COMMIT"]))
step("missing tag", lambda: which("hf-hub:org/net@v9"))
step("private", lambda: which("hf-hub:org/secret"))
step("private with token", lambda: os.environ.update(HF_TOKEN=os.environ["TOKEN"]) or which("hf-hub:org/secret"))
for name, code in json.load(open("usage.json")).items():
    step(name, lambda: exec(code, {}) or "ran")
print(json.dumps(said))
"""


def run(script: str, cwd, env: dict[str, str]) -> dict:
    project = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, **env, "PROJECT": project}
    done = subprocess.run([sys.executable, "-c", START + script], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def usage_of(card: str) -> str:
    return textwrap.dedent(card.split("```python\n")[1].split("```")[0])


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Everything that happened: the server afterwards, what the publisher said and what the loader said."""
    work = tmp_path_factory.mktemp("hub")
    norm = {f"layer1.0.bn1.{n}": {0: 9} for n in ("weight", "bias", "running_mean", "running_var")}
    widths = {"layer1.0.conv1.weight": {0: 9}, "layer1.0.conv2.weight": {1: 9}, **norm}
    expected = {"image": torch.randn(1, 3, 32, 32)}
    for name in ("first", "second", "third"):
        model = timm.create_model("knapsack_pruned", channels=tk.ChannelConfig("cifar_resnet20", widths)).eval()
        picture = (lambda path: path.write_bytes(b"a picture")) if name == "first" else None
        tk.save_pretrained(model, work / "folders" / name, picture=picture, verify=False)
        with torch.no_grad():
            expected[name] = model(expected["image"])
    torch.save(expected, work / "expected.pt")
    with HubServer({"good": "org"}) as hub:
        env = {"TOKEN": "good", "FOLDERS": str(work / "folders"), "EXPECTED": str(work / "expected.pt")}
        published = run(PUBLISH, work, env | hub.environment(work / "home1"))
        env["COMMIT"] = published["again"].rpartition("/")[2]

        usage = {f"card of {name}": usage_of((CARDS / f"{name}.md").read_text()) for name in EXECUTED}
        repo = hub.repos["org/net"]
        usage["card on the Hub"] = usage_of(repo.commits[repo.refs["main"]]["README.md"].decode())
        (work / "usage.json").write_text(json.dumps(usage))
        Image.new("RGB", (300, 200), "orange").save(work / "image.jpg")
        for name in EXECUTED[1:]:  # stand-ins for timm's weights, under timm's ids
            source = TIMM_WEIGHTS[name]
            state = {
                k: v.half() if v.is_floating_point() else v for k, v in timm.create_model(name).state_dict().items()
            }
            hub.repos[f"timm/{source}"] = Repo(private=False)
            hub.repos[f"timm/{source}"].commit("main", {"model.safetensors": save(state)}, "weights")
        hub.requests.clear()
        loaded = run(LOAD, work, env | hub.environment(work / "home2"))
        yield hub, published, loaded


def test_publish_is_one_commit_of_the_right_files(story):
    hub, said, _ = story
    assert said["first"].startswith(f"{hub.url}/org/net/commit/")
    files = [".gitattributes", "README.md", "channels.json", "config.json", "kept_channels.png", "model.safetensors"]
    assert said["list"] == files
    messages = hub.repos["org/net"].messages
    assert messages[0] == "initial commit" and set(messages[1:]) == {"Publish a pruned cifar_resnet20"}
    card = hub.repos["org/net"].commits[hub.repos["org/net"].refs["v1"]]["README.md"].decode()
    assert 'timm.create_model("hf-hub:org/net", pretrained=True)' in card and "kept_channels.png" in card


def test_republish_replaces_what_is_no_longer_there(story):
    hub, said, _ = story
    again = hub.repos["org/net"].commits[said["again"].rpartition("/")[2]]
    assert "kept_channels.png" not in again and "kept_channels.png" not in again["README.md"].decode()
    assert said["same again"].startswith(hub.url)


def test_tokens_namespaces_and_lists(story):
    hub, said, _ = story
    assert said["no token"].startswith("HubError: publishing org/net needs a Hub token, and none was found")
    assert said["bad token"].startswith("HubError: creating the repository for org/net failed: the Hub does not accept")
    assert said["foreign"].startswith("HubError: creating the repository for other/net failed: the token may not write")
    assert said["tag taken"].startswith("HubError: setting the tag v1 for org/net failed: the Hub reports a conflict")
    assert said["short name"] == "org/short"
    assert hub.repos["org/secret"].private and not hub.repos["org/net"].private
    assert said["models"] == ["org/net", "org/secret", "org/short"]
    assert said["models without token"] == ["org/net", "org/short"]
    for name, text in said.items():
        assert "\n" not in str(text), name


def test_a_server_that_dies_gives_a_clear_error_and_a_retry_succeeds(story):
    hub, said, loaded = story
    for at in ("PUT", "/commit/"):
        assert said[f"dies at {at}"].startswith(
            "HubError: uploading for org/net failed: the connection to http://127.0.0.1"
        )
        assert said[f"dies at {at}"].endswith("run it again")
    assert said["after PUT"] != said["retry"].rpartition("/")[2]  # nothing half-published in between
    assert said["retry"].startswith(f"{hub.url}/org/net/commit/")
    assert loaded["main"] == ["third"]


def test_load_in_a_fresh_process_and_cache(story):
    _, _, said = story
    assert (said["main"], said["tag"], said["branch"], said["commit"]) == (["third"], ["first"], ["first"], ["second"])
    assert said["private with token"] == ["first"]
    assert "RevisionNotFoundError" in said["missing tag"]
    assert "RepositoryNotFoundError" in said["private"] and "private" in said["private"]


def test_the_usage_code_of_the_cards_runs(story):
    _, _, said = story
    cards = {name: text for name, text in said.items() if name.startswith("card ")}
    assert len(cards) == len(EXECUTED) + 1 and set(cards.values()) == {"ran"}, cards
    model = usage_of((CARDS / f"{EXECUTED[1]}.md").read_text())
    for name in TIMM_WEIGHTS:  # the other cards say the same, with another name
        assert usage_of((CARDS / f"{name}.md").read_text()) == model.replace(EXECUTED[1], name)


def test_named_weights_came_from_timms_repositories(story):
    hub, _, _ = story
    asked = {path.split("/resolve/")[0].strip("/") for method, path in hub.requests if "/resolve/" in path}
    assert {f"timm/{TIMM_WEIGHTS[name]}" for name in EXECUTED[1:]} <= asked


def test_a_busy_hub_is_waited_for_as_long_as_it_asks_and_not_for_ever(story):
    hub, said, _ = story
    for at in ("create", "commit", "tag"):
        assert said[f"busy {at}"].startswith(f"{hub.url}/org/busy/commit/"), said[f"busy {at}"]
    assert (said["slept create"], said["slept commit"], said["slept tag"]) == ([7.0], [1.0, 2.0], [1.0, 1.0, 1.0])
    assert "answered 503, 5 times" in said["busy for good, 0"] and said["slept 0"] == [0.0] * 4
    assert "answered 503" in said["busy for good, 9999"] and said["slept 9999"] == []


def test_a_token_is_never_in_an_error(story):
    _, said, _ = story
    assert said["newline"] == "org/busy"  # a file's last line break is not part of it
    for name in ("inner newline", "strange", "empty", "unknown"):
        assert "HubError" in said[name] and "hf_abc" not in said[name], said[name]
