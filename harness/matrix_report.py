"""The page that `optstream matrix --report FILE.html` writes: one file that needs nothing else."""

from __future__ import annotations

from optstream.core.validator import RULES, STEPS
from optstream.harness.errors import ConfigurationError
from optstream.harness.matrix import MatrixReport
from optstream.harness.output import write_text

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>optstream: the argument matrix</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .35rem .8rem; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
code { background: #f4f4f4; padding: .1rem .3rem; }
.passed { color: #17692b; } .failed { color: #a11; }
</style>
</head>
<body>
<h1>The argument matrix: <span class="{{ 'passed' if report.passed else 'failed' }}">
{{- "every verdict agrees" if report.passed else "%d failures" % report.failures|length }}</span></h1>
<table>
{% for name, value in counts %}<tr><th>{{ name }}</th><td class="number">{{ value }}</td></tr>
{% endfor %}</table>
{% if report.failures %}<h2>Failures</h2>
<table>
<tr><th>in</th><th>what</th><th>see it again</th></tr>
{% for failure in report.failures %}<tr><td>{{ failure.kind }}</td><td>{{ failure.what }}</td>
<td><code>{{ failure.command }}</code></td></tr>
{% endfor %}</table>
{% endif %}<h2>How flags resolve, in this order</h2>
<ol>
{% for step in steps %}<li>{{ step.text }}</li>
{% endfor %}</ol>
<h2>What is refused</h2>
<table>
<tr><th>rule</th><th>refused</th><th>because</th><th>instead</th></tr>
{% for rule in rules %}<tr><td><code>{{ rule.id }}</code></td><td>{{ rule.refused }}</td>
<td>{{ rule.why }}</td><td>{{ rule.remedy }}</td></tr>
{% endfor %}</table>
</body>
</html>
"""


def write_report(path: str, report: MatrixReport) -> None:
    """Raises ConfigurationError where the file cannot be written or jinja2 is not installed."""
    write_text(path, render(report))


def render(report: MatrixReport) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise ConfigurationError(
            "no page can be made",
            why="jinja2 is not installed",
            remedy="Run: pip install 'optstream[report]'",
        ) from error
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_PAGE).render(
        report=report, counts=counts(report), rules=RULES, steps=STEPS
    )


def counts(report: MatrixReport) -> list[tuple[str, str]]:
    """The figures, in words, for the page and the terminal alike."""
    return [
        ("combinations", f"{report.combinations:,}"),
        ("allowed", f"{report.valid:,}"),
        ("refused", f"{report.invalid:,}"),
        ("disagreements", f"{report.disagreements:,}"),
        ("drawn and judged whole", f"{report.brute_forced:,}"),
        ("executed", f"{report.executed:,}"),
        ("allowed pairs covered", f"{report.pairs_covered:,} of {report.pairs_total:,}"),
        ("allowed triples covered", f"{report.triples_covered:,} of {report.triples_total:,}"),
    ]
