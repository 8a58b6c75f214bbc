"""Writes the measured parts of README.md from the files under results/: no number in it is typed by hand.

python tools/render_readme.py          # rewrite
python tools/render_readme.py --check  # exit 1 if the page and the results differ
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
README = ROOT / "README.md"


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["--:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(mean: dict[str, Any] | None, scale: float = 1.0, digits: int = 1) -> str:
    if mean is None:
        return "–"
    value, error = f"{scale * mean['value']:.{digits}f}", mean["standard_error"]
    return value if error is None else f"{value} ± {scale * error:.{digits}f}"


def rate(lr: float) -> str:
    mantissa, exponent = f"{lr:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def demo() -> str:
    saved = load("demo/result.json")
    summary, config = saved["result"]["summary"], saved["config"]
    rows = [[r["label"], *(spread(r[k], 100) for k in ("last", "best", "memorized"))] for r in summary["rows"]]
    head = ["test accuracy, %", "last step", "best step", "wrong labels memorized"]
    note = (
        f"{config['seeds']} paired seeds, {config['train_size']} images, batches of {config['batch_size']}, "
        f"{config['steps']} steps, mean ± standard error."
    )
    return "\n\n".join([table(head, rows), f"**{summary['headline']}** {summary['sensitivity_line']}", note])


def clean_lm() -> str:
    saved = load("clean_lm.json")
    cells = {(r["optimizer"], r["lr"]): r for r in saved["result"]["summary"]}
    lrs = sorted({lr for _, lr in cells})
    names = {
        "AdamW": "AdamW",
        "soft": "PopRiskAdamW, defaults (soft, α = 1)",
        "calibrated": '`alpha="calibrated"`',
        "snr": '`gate="snr"`',
    }

    def cell(name: str, lr: float) -> str:
        row = cells.get((name, lr))
        if row is None:
            return ""
        gate = "" if row["mean_gate"] is None else f" ({row['mean_gate']['value']:.3f})"
        return f"{row['loss']['value']:.2f}{gate}"

    rows = [[text, *(cell(name, lr) for lr in lrs)] for name, text in names.items()]
    adamw = cells[("AdamW", 1e-3)]["loss"]["value"]
    tuned = min(r["loss"]["value"] for (name, _), r in cells.items() if name == "AdamW")
    same = cells[("soft", 1e-3)]["loss"]["value"]
    tenfold = {name: cells[(name, 1e-2)]["loss"]["value"] - adamw for name in ("soft", "calibrated", "snr")}
    words = (
        f"Swapped in at an unchanged lr of 1e-3, the defaults end {same - adamw:.2f} nats behind AdamW; at ten times "
        f'the lr {tenfold["soft"]:.2f} behind, with `alpha="calibrated"` {tenfold["calibrated"]:.2f} and with '
        f'`gate="snr"` {tenfold["snr"]:.2f}. (AdamW at the best lr of its grid is another {adamw - tuned:.2f} lower.)'
    )
    model = saved["config"]["model"]
    note = (
        f"Held-out loss in nats per character (mean gate in brackets) after {model['steps']} steps of a "
        f"{model['layers']}-layer transformer of width {model['width']} on the text of Python's own manual, "
        f"{saved['config']['seeds']} seeds."
    )
    return "\n\n".join([words, table(["lr", *map(rate, lrs)], rows), note])


def clipping() -> str:
    rows = []
    for r in load("clipping.json")["result"]["summary"]:
        if r["optimizer"] == "AdamW":
            continue
        norm = "none" if r["max_norm"] is None else f"{r['max_norm']:g}"
        metric = f"{spread(r['accuracy'], 100)} %" if r.get("accuracy") else f"{spread(r['loss'], 1, 3)} nats"
        clipped = "0" if r["clipped_share"] is None else f"{100 * r['clipped_share']['value']:.0f}"
        rows.append([r["task"], norm, f"{clipped} %", f"{r['mean_gate']['value']:.4f}", metric])
    return table(["task", "`max_norm`", "steps clipped", "mean gate", "last step"], rows)


def speed() -> str:
    parts = []
    for name, device in (("optimizer_step_cpu.json", "2 CPU cores"), ("optimizer_step_cuda.json", "one H200")):
        saved = load(name)
        rows = []
        for case, r in saved["cases"].items():
            rows.append([case, f"{r['ours_ms']:.2f}", f"{r['adamw_ms']:.2f}", f"{r['ratio']:.3f}"])
        head = [f"{device}, torch {saved['environment']['torch'].split('+')[0]}", "ours, ms", "AdamW, ms", "ratio"]
        parts.append(table(head, rows))
    cuda = load("optimizer_step_cuda.json")["cases"]["494M, 1 tensor"]
    share, extra = cuda["share_of_copy_bandwidth"], cuda["extra_bytes_per_parameter"]
    parts.append(
        f"On the H200 the step runs at {share:.0%} of the bandwidth of a plain copy and allocates {extra:.3f} bytes "
        "per parameter while it runs."
    )
    return "\n\n".join(parts)


SECTIONS: dict[str, Callable[[], str]] = {"demo": demo, "clean_lm": clean_lm, "clipping": clipping, "speed": speed}


def render(page: str) -> str:
    """The page with every section between its markers written anew."""
    for name, section in SECTIONS.items():
        pattern = re.compile(rf"(<!-- begin:{name} -->\n).*?(<!-- end:{name} -->)", re.DOTALL)
        if not pattern.search(page):
            raise SystemExit(
                f"README.md has no section {name!r}: put <!-- begin:{name} --> and <!-- end:{name} --> into it"
            )
        text = section()
        page = pattern.sub(lambda m, text=text: m.group(1) + text + "\n" + m.group(2), page)
    return page


def main() -> None:
    page = README.read_text()
    new = render(page)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if new == page else "README.md differs from results/: run python tools/render_readme.py")
    README.write_text(new)


if __name__ == "__main__":
    main()
