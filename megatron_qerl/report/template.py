"""The report's page: one jinja2 template with its style sheet, and nothing that a browser would have to fetch.

Values reach it as plain text and are escaped on the way in; only the plots, which this package draws itself, are put in
as markup.
"""

from __future__ import annotations

STYLE = """
:root { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --wash: #f6f8fa; --link: #0550ae; --warn: #9a3412; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 62rem; color: var(--ink); background: #fff;
       font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; padding-top: .4rem;
     border-top: 1px solid var(--line); } h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
a { color: var(--link); } p { margin: .4rem 0 .8rem; }
code, pre { font: .86em/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; background: var(--wash); border: 1px solid var(--line); border-radius: 6px;
      padding: .7rem .9rem; margin: .4rem 0; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } td.number, th.number { text-align: right; white-space: nowrap; }
td.name { white-space: nowrap; }
header th, #summary th { width: 17rem; }
nav ul { columns: 3 15rem; column-gap: 2rem; padding-left: 1.1rem; margin: .5rem 0; } nav li { break-inside: avoid; }
figure { margin: .6rem 0 0; } figure svg { width: 100%; height: auto; display: block; }
.lead { color: var(--soft); } .unmeasured { color: var(--soft); font-style: italic; }
.note { border-left: 4px solid #e3a008; background: #fffbea; padding: .5rem .9rem; margin: .8rem 0; }
.biased { border-left-color: #c2410c; background: #fff4ed; }
.sample { border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem; margin: .8rem 0; }
.tag { display: inline-block; padding: 0 .55rem; border-radius: 1rem; background: var(--wash);
       border: 1px solid var(--line); font-size: .85rem; }
.tag.correct { background: #e3f6ec; border-color: #009e73; } .tag.wrong { background: #fdebdd; border-color: #d55e00; }
.tag.truncated { background: #fff3d6; border-color: #e69f00; }
.tag.unparsable { background: #f9eaf3; border-color: #cc79a7; }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; } a { color: inherit; }
  table { font-size: 8pt; } td.name { white-space: normal; }
  h2, h3 { break-after: avoid; } figure, tr, .sample { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

PAGE = """\
{%- macro shown(value) -%}
  {%- if value is none -%}<span class="unmeasured">not measured</span>{%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- macro metric_table(rows) -%}
<table>
<tr><th>metric</th><th>definition</th><th class="number">first</th><th class="number">last</th>
<th class="number">min</th><th class="number">max</th><th class="number">steps</th></tr>
{%- for row in rows %}
<tr><td class="name"><code>{{ row.name }}</code><br><span class="lead">unit: {{ row.unit }}</span></td>
<td>{{ row.definition }}</td><td class="number">{{ row.first }}</td><td class="number">{{ row.last }}</td>
<td class="number">{{ row.min }}</td><td class="number">{{ row.max }}</td><td class="number">{{ row.recorded }}</td>
</tr>
{%- endfor %}
</table>
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>{{ style }}</style>
</head>
<body>
<header>
<h1>{{ page.title }}</h1>
<p class="lead">{{ page.subtitle }}</p>
<table>
{%- for name, value in page.header %}
<tr><th>{{ name }}</th><td>{{ shown(value) }}</td></tr>
{%- endfor %}
</table>
<p class="note{% if page.biased %} biased{% endif %}"><strong>Likelihood: {{ page.likelihood }}.</strong>
{{ page.likelihood_note }}</p>
</header>
<nav aria-label="contents"><h2>Contents</h2><ul>
<li><a href="#summary">Summary</a></li>
<li><a href="#evaluation">Accuracy before and after</a></li>
{%- for plot in page.plots %}
<li><a href="#{{ plot.key }}">{{ plot.title }}</a></li>
{%- endfor %}
<li><a href="#samples">Samples</a></li>
<li><a href="#unmeasured">What was not measured</a></li>
<li><a href="#config">Configuration</a></li>
</ul></nav>
<main>
<section id="summary"><h2>Summary</h2>
<table>
{%- for name, value in page.summary %}
<tr><th>{{ name }}</th><td>{{ shown(value) }}</td></tr>
{%- endfor %}
</table>
</section>
<section id="evaluation"><h2>Accuracy before and after</h2>
<p>The deployed policy is the clean one: base and adapter, without noise. An interval tells how much the accuracy would
move with other problems of the same kind; it does not cover other training seeds.</p>
{%- if page.accuracy_plot %}
<figure>{{ page.accuracy_plot }}</figure>
{%- else %}
<p class="unmeasured">not measured</p>
{%- endif %}
{%- if page.accuracies %}
<table>
<tr><th>evaluation</th><th class="number">step</th><th>decoding</th><th class="number">accuracy</th>
<th>interval</th><th class="number">answers</th><th class="number">clusters</th><th>method</th></tr>
{%- for row in page.accuracies %}
<tr><td>{{ row.label }}</td><td class="number">{{ row.step }}</td><td>{{ row.decoding }}</td>
<td class="number">{{ row.mean }}</td><td>{{ shown(row.interval) }}</td><td class="number">{{ row.count }}</td>
<td class="number">{{ row.clusters }}</td><td>{{ shown(row.method) }}</td></tr>
{%- endfor %}
</table>
{%- endif %}
{%- if page.evals %}
<h3>Outcomes of the evaluation answers</h3>
<table>
<tr><th>evaluation</th><th>source</th>
{%- for outcome in page.outcomes %}<th class="number">{{ outcome }}</th>{% endfor %}
</tr>
{%- for row in page.evals %}
<tr><td>{{ row.label }}</td><td>{{ row.source }}</td>
{%- for count in row.counts %}<td class="number">{{ count }}</td>{% endfor %}</tr>
{%- endfor %}
</table>
{%- endif %}
{%- for line in page.changes %}
<p>{{ line }}</p>
{%- endfor %}
</section>
{%- for diagnosis in page.diagnoses %}
<section id="diagnosis{{ loop.index }}"><h2>What the noise did: {{ diagnosis.title }}</h2>
<p class="lead">{{ diagnosis.lead }}</p>
<table>
{%- for name, value, definition in diagnosis.rows %}
<tr><td class="name"><code>{{ name }}</code></td><td>{{ value }}</td><td>{{ definition }}</td></tr>
{%- endfor %}
</table>
</section>
{%- endfor %}
{%- for plot in page.plots %}
<section id="{{ plot.key }}"><h2>{{ plot.title }}</h2>
<figure>{{ plot.svg }}</figure>
{{ metric_table(plot.rows) }}
{%- if plot.missing %}
<p class="unmeasured">Not measured in this run: {{ plot.missing | join(", ") }}.</p>
{%- endif %}
{%- if plot.thinned %}
<p class="lead">{{ plot.thinned }}</p>
{%- endif %}
</section>
{%- endfor %}
<section id="samples"><h2>Samples</h2>
{%- if page.samples %}
<p>{{ page.samples_note }}</p>
{%- for sample in page.samples %}
<article class="sample"><p><span class="tag {{ sample.outcome }}">{{ sample.outcome }}</span>
step {{ sample.step }}, problem <code>{{ sample.uid }}</code>, reward {{ sample.reward }} (score {{ sample.score }}),
{{ sample.tokens }} tokens</p>
<p><strong>Question</strong></p><pre>{{ sample.question }}</pre>
<p><strong>Response</strong></p><pre>{{ sample.text }}</pre>
<p>Reference answer: <code>{{ sample.answer }}</code>; read from the response:
{% if sample.extracted is none %}<span class="unmeasured">nothing</span>{% else %}<code>{{ sample.extracted }}</code>
{%- endif %}</p></article>
{%- endfor %}
{%- else %}
<p class="unmeasured">No completions were recorded.</p>
{%- endif %}
</section>
<section id="unmeasured"><h2>What was not measured</h2>
<ul>
{%- for note in page.notes %}
<li>{{ note }}</li>
{%- endfor %}
</ul>
{%- for group in page.missing %}
<h3>{{ group.title }}</h3>
<table>
{%- for metric in group.metrics %}
<tr><td class="name"><code>{{ metric.name }}</code></td><td>{{ metric.definition }}</td></tr>
{%- endfor %}
</table>
{%- endfor %}
</section>
<section id="config"><h2>Configuration</h2>
{%- if page.config_text %}
<p>Every key with the value used.</p><pre>{{ page.config_text }}</pre>
{%- else %}
<p class="unmeasured">not recorded</p>
{%- endif %}
</section>
</main>
</body>
</html>
"""
