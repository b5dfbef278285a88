"""The demo: what an agent does with a sandbox, with the agent's part written down.

A CSV and a SQL dump of it go in; Python in the guest answers a question, draws a chart, answers a follow-up
from the data frame that is still in memory, and asks the same of the SQL. Prints where the time went.
"""

from __future__ import annotations

import argparse
import csv
import io
import sqlite3
import sys
import time
import warnings
from pathlib import Path

from llm4agents import EmulationWarning, Execution, LLM4AgentsError, Sandbox

LOAD = """
import pandas as pd
df = pd.read_csv("data.csv")
for column in df.columns:
    if "date" in column.lower():
        df[column] = pd.to_datetime(df[column])
print(f"{len(df):,} rows, {len(df.columns)} columns: {', '.join(df.columns)}")
"""

WEATHER = {
    "question": "Which month is the wettest in Seattle, and which weather brings the rain?",
    "answer": """
month = df.date.dt.month_name().str[:3]
order = list(dict.fromkeys(month))
years = df.date.dt.year.nunique()
wet = df.groupby(month).precipitation.sum().reindex(order) / years
share = df.groupby("weather").precipitation.sum().sort_values(ascending=False)
share /= share.sum()
f"{wet.idxmax()}, {wet.max():.0f} mm a year; {share.index[0]} brings {share.iloc[0]:.0%} of it"
""",
    "chart": """
import matplotlib.pyplot as plt
fig, ax = plt.subplots(figsize=(7, 3.5))
ax.bar(wet.index, wet, color="#4c78a8", label="rain")
ax.set_ylabel("mm a month")
warm = ax.twinx()
warm.plot(order, df.groupby(month).temp_max.mean().reindex(order), color="#e45756")
warm.set_ylabel("mean daily maximum, °C")
ax.set_title("Seattle, 2012-2015")
fig.tight_layout()
""",
    "follow_up": "And how much warmer is a dry day than a wet one?",
    "follow_up_code": """
dry = df.precipitation == 0
gap = df[dry].temp_max.mean() - df[~dry].temp_max.mean()
f"{gap:.1f} °C warmer ({dry.sum()} dry days, {(~dry).sum()} wet)"
""",
    "sql": "SELECT weather, COUNT(*) AS days, ROUND(SUM(precipitation)) AS mm "
    "FROM data GROUP BY weather ORDER BY mm DESC",
}

ANY = {
    "question": "What is in it?",
    "answer": """
numbers = df.select_dtypes("number")
spread = (numbers.std() / numbers.mean().abs()).sort_values(ascending=False)
widest = spread.index[0]
f"{len(numbers.columns)} numeric columns; {widest} varies most (mean {numbers[widest].mean():.4g})"
""",
    "chart": """
import matplotlib.pyplot as plt
numbers.iloc[:, :6].hist(figsize=(8, 5), bins=30)
plt.tight_layout()
""",
    "follow_up": "Which two columns go together most?",
    "follow_up_code": """
import numpy as np
c = numbers.corr().abs()
c = c.where(np.triu(np.ones(c.shape, bool), 1)).stack()
f"{' and '.join(c.idxmax())}: correlation {c.max():.2f}" if len(c) else "there is only one numeric column"
""",
    "sql": "SELECT COUNT(*) AS rows FROM data",
}


def seattle() -> bytes:
    """Public data that a package ships: four years of Seattle's weather (vega_datasets)."""
    import vega_datasets

    return (Path(vega_datasets.__file__).parent / "_data" / "seattle-weather.csv").read_bytes()


def sql_dump(raw: bytes) -> str:
    """The CSV as a SQL dump, the way `sqlite3 .dump` writes one."""
    rows = list(csv.reader(io.StringIO(raw.decode("utf-8-sig"))))
    names = ", ".join('"{}"'.format(name.replace('"', '""')) for name in rows[0])
    with sqlite3.connect(":memory:") as db:
        db.execute(f"CREATE TABLE data ({names})")
        width = len(rows[0])
        db.executemany(
            f"INSERT INTO data VALUES ({', '.join('?' * width)})",
            [[_number(cell) for cell in row] for row in rows[1:] if len(row) == width],
        )
        return "\n".join(db.iterdump())


def _number(cell: str) -> str | float:
    try:
        return float(cell)
    except ValueError:
        return cell


class Clock:
    """Wall time of each step, for the table at the end."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float]] = []
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.steps.append((name, now - self._last))
        self._last = now


def checked(execution: Execution) -> Execution:
    if execution.error is not None:
        raise SystemExit(f"the code failed in the sandbox:\n{execution.error.traceback}")
    return execution


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--csv", type=Path, help="another CSV file (default: Seattle's weather)")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where the chart goes")
    args = parser.parse_args()
    if args.csv and not args.csv.is_file():
        parser.error(f"{args.csv} is not a file")
    raw, plan = (args.csv.read_bytes(), ANY) if args.csv else (seattle(), WEATHER)

    def note(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        said = "note" if issubclass(category, EmulationWarning) else category.__name__
        print(f"{said}: {message}", file=sys.stderr)

    warnings.showwarning = note
    clock = Clock()
    last = ""

    def progress(step: str, detail: str = "", fraction: float | None = None) -> None:
        nonlocal last
        if step != last:
            print(f"  … {step} {detail}".rstrip(), file=sys.stderr, flush=True)
            last = step

    # The first create builds the template; a second sandbox shows what creating costs from then on.
    with Sandbox.create("python", on_progress=progress):
        clock.lap("first create (server start; template build if there was none)")
    with Sandbox.create("python") as sandbox:
        clock.lap("create: a clone of the frozen machine")
        sandbox.files.write("data.csv", raw)
        sandbox.files.write("data.sql", sql_dump(raw))
        clock.lap("copy the CSV and its SQL dump in")
        print(checked(sandbox.run_code(LOAD)).stdout.strip())
        clock.lap("load it with pandas")
        print(f"\nQ: {plan['question']}\nA: {_text(checked(sandbox.run_code(plan['answer'])))}")
        clock.lap("answer")
        chart = next((r.png for r in checked(sandbox.run_code(plan["chart"])).results if r.png), None)
        if chart is None:
            raise SystemExit("the sandbox returned no chart")
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / "chart.png"
        path.write_bytes(chart)
        clock.lap("chart")
        print(f"   chart: {path} ({len(chart):,} bytes)")
        print(f"\nQ: {plan['follow_up']}\nA: {_text(checked(sandbox.run_code(plan['follow_up_code'])))}")
        clock.lap("follow-up, from the data frame still in memory")
        sql = f"""
import sqlite3
db = sqlite3.connect(":memory:")
_ = db.executescript(open("data.sql").read())
print(pd.read_sql({plan["sql"]!r}, db).to_string(index=False))
"""
        print(f"\nSQL: {plan['sql']}\n{checked(sandbox.run_code(sql)).stdout.rstrip()}")
        clock.lap("the same from the SQL dump")
        uname = sandbox.exec(["uname", "-rm"]).stdout.strip()
        clock.lap("exec uname")
    clock.lap("kill")
    print(f"\nIt ran on Linux {uname} in a microVM of its own. Where the time went:")
    for name, seconds in clock.steps:
        print(f"  {seconds * 1000:9.0f} ms  {name}")


def _text(execution: Execution) -> str:
    return (execution.text or "").strip("'\"")


if __name__ == "__main__":
    try:
        main()
    except LLM4AgentsError as error:
        raise SystemExit(f"error: {error}") from None
