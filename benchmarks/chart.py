"""Draw the README's chart from benchmarks/results/: whole training steps over torch.compile, defaults only.

python benchmarks/chart.py        writes docs/images/steps-light.svg and steps-dark.svg
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# (file, title, entrants as (row, name)): each file is one run on one GPU.
CHARTS = (
    (
        "step-hf-8b-4l-h200-2026-11-16.json",
        "Hugging Face Llama, 8B width, 4 layers",
        (("torch", "torch.compile"), ("liger", "Liger"), ("fp8", "Deepwell")),
    ),
    (
        "step-8b-4l-h200-2026-11-16.json",
        "The same as a plain PyTorch decoder",
        (("torch", "torch.compile"), ("torchao", "torchao FP8"), ("fp8", "Deepwell")),
    ),
)
THEMES = {
    "light": {"text": "#1f2328", "faint": "#59636e", "bar": "#c4cbd3", "own": "#0969da"},
    "dark": {"text": "#f0f6fc", "faint": "#9198a1", "bar": "#3d444d", "own": "#4493f8"},
}
WIDTH, LEFT, RIGHT, ROW, GAP = 720, 130, 150, 24, 44


def bars() -> list[tuple[str, list[tuple[str, float, float]]]]:
    """(title, [(entrant, milliseconds, speed over the first)]) of each chart."""
    found = []
    for file, title, entrants in CHARTS:
        data = json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))
        ms = {row["name"]: float(row["ms"]) for row in data["rows"]}
        first = ms[entrants[0][0]]
        found.append((title, [(name, ms[row], first / ms[row]) for row, name in entrants]))
    return found


def draw(theme: dict[str, str]) -> str:
    charts = bars()
    top = max(speed for _, rows in charts for _, _, speed in rows)
    scale = (WIDTH - LEFT - RIGHT) / top
    height = sum(GAP + ROW * len(rows) for _, rows in charts) + 26
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="-apple-system,Segoe UI,Helvetica,Arial,sans-serif" font-size="13">'
    ]
    y = 0
    for title, rows in charts:
        out.append(f'<text x="0" y="{y + 26}" fill="{theme["text"]}" font-weight="600">{title}</text>')
        y += GAP - 8
        for name, ms, speed in rows:
            own = name == "Deepwell"
            color = theme["own" if own else "bar"]
            weight = ' font-weight="600"' if own else ""
            out.append(
                f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end" fill="{theme["text"]}"{weight}>{name}</text>'
            )
            out.append(f'<rect x="{LEFT}" y="{y + 3}" width="{speed * scale:.1f}" height="16" rx="2" fill="{color}"/>')
            label = f"{speed:.2f}x, {ms:.0f} ms"
            out.append(
                f'<text x="{LEFT + speed * scale + 8:.1f}" y="{y + 15}" fill="{theme["text"]}"{weight}>{label}</text>'
            )
            y += ROW
        y += 8
    note = "Training step, 2 x 8192 tokens, one H200, 2026-11-16. Head in bf16, no options set."
    out.append(f'<text x="0" y="{height - 6}" fill="{theme["faint"]}" font-size="12">{note}</text></svg>')
    return "\n".join(out) + "\n"


def main() -> None:
    folder = ROOT / "docs" / "images"
    folder.mkdir(exist_ok=True)
    for name, theme in THEMES.items():
        (folder / f"steps-{name}.svg").write_text(draw(theme), encoding="utf-8")


if __name__ == "__main__":
    main()
