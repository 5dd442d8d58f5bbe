"""The report: what it says, that it stands alone, and (marker ``browser``) how it looks in Chromium."""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser

import pytest
import timm
import torch

import timm_knapsack as tk
from timm_knapsack.errors import KnapsackError
from timm_knapsack.human_numbers import human
from timm_knapsack.pipeline.saving import save_run
from timm_knapsack.reports.charts import _accuracy
from timm_knapsack.reports.page import _cost_note, accuracy_rows, stage_macs, write_report, write_sweep_page
from timm_knapsack.reports.pictures import chart, stage_of
from timm_knapsack.reports.run_record import RunRecord


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    model = timm.create_model("cifar_resnet20")
    groups = tk.find_channel_groups(model)
    scores = tk.taylor_scores(model, groups, criterion="random")
    return tk.prune(model, scores=scores, budget=tk.Budget(macs=0.5), groups=groups)


@pytest.fixture(scope="module")
def folder(result, tmp_path_factory):
    """A saved model whose record has everything that a report can show."""
    record = RunRecord.of_pruning(result, command="timm-knapsack run <recipe> & more")
    rows = {"original": 93.4, "pruned": 11.2, "recovered": 91.0, "fine-tuned": 93.1}
    for what, top1 in rows.items():
        record.add_evaluation(what, {"top1": top1, "top5": 99.0, "loss": 0.2, "samples": 10000}, "uoft-cs/cifar10")
    history = [
        {
            "epoch": i // 10,
            "update": i,
            "lr": 0.02,
            "total": 8 / (i + 1) + 0.4,
            "ce": 2 / (i + 1) + 0.1,
            "kd": 0.3,
            "ikd": 0.2,
        }
        for i in range(1, 60, 3)
    ]
    tested = [{"epoch": e, "update": 10 * e, "top1": 93.1 - 1 / e, "top5": 99.0, "loss": 0.2} for e in range(1, 7)]
    config = {"epochs": 6, "optimizer": "sgd", "lr": 0.02, "scheduler": "cosine"}
    config["distillation"] = {"kd_weight": 1.0, "ikd_weight": 20.0, "ikd_at": "blocks"}
    record.finetune = {"config": config, "history": history, "evaluations": tested, "updates": 60}
    record.latency = {"original": 0.021, "pruned": 0.0123, "batch_size": 16, "threads": 2, "device": "cpu"}
    record.sweep = [{"what": "original", "kind": "original", "macs": 41e6, "top1": 93.4}]
    record.sweep += [
        {"what": f"{share:.0%}", "kind": "pruned and recovered", "macs": 41e6 * share, "top1": 92 - 8 * (0.7 - share)}
        for share in (0.7, 0.5, 0.3)
    ]
    record.sweep += [
        {
            "what": f"{side} px",
            "kind": "original, smaller images",
            "macs": 41e6 * (side / 32) ** 2,
            "top1": 93 - (32 - side) * 3,
        }
        for side in (28, 24, 20)
    ]
    for number, name in enumerate(["conv1", "layer1.0.conv1", "layer3.2.conv1"]):
        counts = [1, 4, 8, 12, 16]
        loss = [(0.3 + number) / n - (0.3 + number) / 16 for n in counts]
        record.curves[name] = {"size": 16, "counts": counts, "loss": loss, "chosen": 9}
    saved, _ = save_run(result, tmp_path_factory.mktemp("report") / "model", record=record, verify=False)
    return saved


@pytest.fixture(scope="module")
def files(folder):
    return write_report(folder)


class Page(HTMLParser):
    """Text and addresses of a page, and whether its tags are balanced."""

    def __init__(self, text: str):
        super().__init__()
        self.words, self.links, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_it_says_what_was_asked_counted_and_measured(files, folder, result):
    page = Page(files[0].read_text())
    text = " ".join(" ".join(page.words).split())
    assert page.open == []
    macs = result.report.line("macs")
    for number in (
        human(macs.original),
        human(macs.asked),
        human(macs.counted),
        "12.3 ms",
        "93.10 %",
        "-0.30",
    ):
        assert number in text, number
    for line in result.report.layers:
        assert f"{line.name} {line.kept} of {line.original}" in text
    assert "timm-knapsack run <recipe> & more" in text


def test_it_stands_alone(files):
    text = files[0].read_text()
    links = Page(text).links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert "<script" not in text and "@import" not in text and "url(http" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert all(f'id="{link[1:]}"' in text for link in links if link.startswith("#"))


def test_pictures_for_the_model_card(files, folder):
    names = {file.name for file in files}
    assert {"kept_channels.png", "kept_channels.svg", "training.png", "accuracy.png", "accuracy_macs.png"} <= names
    assert (folder / "kept_channels.png").read_bytes().startswith(b"\x89PNG")
    assert "kept_channels.png" in (folder / "README.md").read_text()


def test_stages_sum_to_the_counted_macs(folder, result):
    rows, macs = stage_macs(folder), result.report.line("macs")
    assert sum(row["original"] for row in rows) == macs.original
    assert sum(row["counted"] for row in rows) == macs.counted
    assert [row["stage"] for row in rows] == ["conv1", "layer1", "layer2", "layer3", "linear"]


def test_without_training_and_matplotlib_there_is_still_a_page(result, tmp_path, monkeypatch):
    monkeypatch.setattr("timm_knapsack.reports.charts.find_spec", lambda name: None)
    saved, _ = save_run(result, tmp_path / "model", record=RunRecord.of_pruning(result), verify=False)
    files = write_report(saved, tmp_path / "elsewhere")
    assert [file.name for file in files] == ["report.html"]
    assert "pip install" in files[0].read_text()


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(KnapsackError, match="no record of a pruning run"):
        write_report(tmp_path)
    (tmp_path / "record.json").write_text('{"format": "other"}')
    with pytest.raises(KnapsackError, match="is not a record"):
        write_report(tmp_path)


def test_stage_of():
    assert [stage_of(name) for name in ("stages.1.blocks.0.conv", "layer4.2.bn1", "head.fc")] == [
        "stages.1",
        "layer4",
        "head",
    ]


# ---- in a browser -------------------------------------------------------------------------------------------------

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr"
).split()

# The page in a frame of the wanted width: a window of Chromium can't be as narrow as a phone.
HARNESS = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<style>body{margin:0}iframe{border:0}</style><iframe id="f" src="report.html" width="WIDTH" height="4200"></iframe>
<pre id="r" hidden></pre><script>
document.getElementById("f").onload = () => {
  const page = document.getElementById("f").contentDocument, root = page.documentElement;
  const view = page.defaultView, light = c => {
    const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  const paper = light(view.getComputedStyle(page.querySelector("section")).backgroundColor);
  let contrast = 99, smallest = 99, outside = [];
  const texts = "h1, h2, p, td, th, dt, dd, figcaption, svg text, .bar span.name, .bar span.number";
  for (const e of page.querySelectorAll(texts)) {
    const style = view.getComputedStyle(e), svg = e.closest("svg");
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    smallest = Math.min(smallest, parseFloat(style.fontSize) * scale);
    contrast = Math.min(contrast, ratio(light(svg ? style.fill : style.color), paper));
    const box = e.getBoundingClientRect();
    if (box.right > root.clientWidth + 1 && !e.closest(".wide")) outside.push(e.textContent);
  }
  const covered = [];
  for (const svg of page.querySelectorAll("svg")) {
    const boxes = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (wide > 2 && high > 4) covered.push(a + " on " + b);
    }));
  }
  document.getElementById("r").textContent =
    JSON.stringify({
      covered, scroll: root.scrollWidth, contrast, smallest, outside, figures: page.querySelectorAll("svg").length});
};</script>"""


def chromium(*arguments: str, profile) -> subprocess.CompletedProcess:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("no chromium; `make test-browser` installs Debian's")
    command = [program, *FLAGS, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_readable_in_chromium(files, folder, tmp_path, width, scheme):
    (folder / "harness.html").write_text(HARNESS.replace("WIDTH", str(width)))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *a: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/harness.html"
        colours = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
        picture = tmp_path / f"{width}-{scheme}.png"
        common = [colours, f"--window-size={max(width, 600)},4200"]
        shown = chromium(*common, f"--screenshot={picture}", address, profile=tmp_path / "a")
        told = chromium(*common, "--virtual-time-budget=4000", "--dump-dom", address, profile=tmp_path / "b")
    finally:
        server.shutdown()
        server.server_close()
    assert picture.stat().st_size > 20_000
    for log in (shown.stderr, told.stderr):
        assert "CONSOLE" not in log, log
    seen = json.loads(html.unescape(re.search(r'<pre id="r"[^>]*>(.*?)</pre>', told.stdout, re.DOTALL)[1]))
    assert seen["scroll"] <= width and seen["outside"] == [] and seen["covered"] == []
    assert seen["smallest"] >= 8.5 and seen["figures"] == 4
    assert seen["contrast"] >= 4.5, seen


def test_the_certificate_is_in_words():
    pruning = {"value": 1.5, "total_value": 3.0, "upper_bound": None}
    assert _cost_note(pruning) == "<p>This choice keeps 50.00% of the importance of all channels.</p>"
    assert "can do better than 66.67%: the solver has proved it" in _cost_note({**pruning, "upper_bound": 2.0})
    assert "By these values no other choice at this cost would keep more" in _cost_note({**pruning, "upper_bound": 1.5})
    # values of curves are powers of losses: what the bound leaves open is told as a loss
    curves = {"value": -0.3, "total_value": 0.0, "predicted_loss": 0.2, "upper_bound": -0.3, "loss_gap": 0.0}
    assert "loses 0.2. By these values no other choice at this cost would lose less" in _cost_note(curves)
    measured = {**curves, "loss": {"kind": "KL divergence", "measured": 0.25}}
    note = _cost_note(measured)
    assert "Measured, it loses 0.25 (KL divergence from the original's outputs). Predicted" in note
    assert "the curves below (group by group), this choice loses 0.2. By" in note
    recovered = {**measured, "loss": {**measured["loss"], "recovered": True}, "trials": {"1.0": 0.2}}
    note = _cost_note(recovered)
    assert "Measured, once recovered, it loses 0.25" in note and "in its trial, on images held out), this" in note
    open_gap = {**curves, "upper_bound": -0.2, "loss_gap": 0.1}
    assert "can do better than 0.1: the solver has proved it" in _cost_note(open_gap)


def test_the_original_is_there_where_images_had_labels(result):
    record = RunRecord.of_pruning(result)
    assert accuracy_rows(record) == []
    loss = {"top1_before": 93.4, "top1_after": 90.1, "images": 512, "recovered": True}
    record.pruning["loss"] = loss
    rows = accuracy_rows(record)
    found = [(row["what"], row["top1"], row["samples"]) for row in rows]
    assert found == [("original", 93.4, 512), ("recovered", 90.1, 512)]
    record.add_evaluation("original", {"top1": 93.0}, "elsewhere")
    assert accuracy_rows(record) == record.evaluations, "what was evaluated on other images wins"


def test_one_epoch_is_a_line(result):
    record = RunRecord.of_pruning(result)
    record.finetune = {"evaluations": [{"epoch": 1, "top1": 92.0}]}
    assert _accuracy(record) is None
    record.add_evaluation("recovered", {"top1": 90.0}, "x")
    assert _accuracy(record)["series"][0]["x"] == [0, 1]


def test_axes_end_at_100_and_names_do_not_overlap():
    import xml.etree.ElementTree as tree

    points = {"x": [10.0, 10.1, 10.2, 40.0], "y": [98.0, 98.01, 98.02, 99.9], "names": ["50%", "49%", "48%", "100%"]}
    svg = chart([{**points, "label": "a", "style": "both"}], title="t", x_label="x", y_label="y", percent=True)
    texts = [text.text for text in tree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    numbers = [float(text) for text in texts if re.fullmatch(r"[\d.]+", text or "")]
    assert max(number for number in numbers if number > 41) == 100.0
    assert "100%" in texts and len({"50%", "49%", "48%"} & set(texts)) < 3, "no room for all three"


def test_a_page_of_a_sweep(tmp_path):
    rows = [{"what": "original", "kind": "original", "macs": 4e7, "top1": 91.7}]
    rows += [{"what": f"{p}%", "kind": "pruned and recovered", "macs": p * 4e5, "top1": 80 + p / 10} for p in (50, 25)]
    page = Page(write_sweep_page(rows, tmp_path, "net <at> several budgets").read_text())
    text = " ".join(" ".join(page.words).split())
    assert page.open == [] and "net <at> several budgets" in text
    assert "pruned and recovered, 25% 10.0 M 25.0% 82.50 %" in text and (tmp_path / "accuracy_macs.png").exists()
