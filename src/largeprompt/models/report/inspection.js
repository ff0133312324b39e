(() => {
  const { all, colour, extent, logTicks, axis } = page;
  const at = (id) => document.getElementById(id);
  const { columns, labels, layers, heads, words, rows } = JSON.parse(at("data").textContent);
  const keyOf = (layer, head) => `${layer}-${head}`;
  const places = new Map(rows.map((row, i) => [keyOf(row.layer, row.head), i]));
  let chosen = 0;

  const inWords = (value) => {
    if (value === null) return "–";
    if (Math.abs(value) < 1e6 && (Number.isInteger(value) || value >= 100)) return Math.round(value).toLocaleString("en");
    const [mantissa, power] = String(Number(value.toPrecision(3))).split("e");
    const small = Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6;
    if (!power && !small) return mantissa.replace("-", "−");
    const [digits, exponent] = value.toExponential(2).split("e");
    const raised = [...String(Number(exponent))].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("");
    return `${String(Number(digits)).replace("-", "−")}×10${raised}`;
  };
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // in Plotly's words some tags mean something
  const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

  // The map: a heatmap of values, one of heads without a number, and a frame around the chosen head.
  const number = at("number");
  const table = (value) => layers.map((_, layer) => Array.from({ length: heads }, (_, head) => {
    const i = places.get(keyOf(layer, head));
    return i === undefined ? null : value(rows[i]);
  }));
  const common = { type: "heatmap", xgap: 1, ygap: 1, hoverongaps: false };

  const entry = (text, style) => {
    const span = document.createElement("span");
    const square = span.appendChild(document.createElement("i"));
    square.className = style;
    span.append(text);
    return span;
  };

  const of = (row, name) => row.numbers[columns.findIndex((column) => column.name === name)];
  const about = (row, more) => [
    `layer ${row.layer}, head ${row.head}: <b>${row.regime}</b>`,
    more,
    `${inWords(of(row, "effective"))} effective tokens, k̂ ${inWords(of(row, "tail") ?? null)}`,
    `<i>${escaped(layers[row.layer])}</i>`,
  ].filter(Boolean).join("<br>");

  const valuesOf = (k) => {
    const { meaning, log } = columns[k];
    const known = rows.map((row) => row.numbers[k]).filter((value) => value !== null && !(log && value <= 0));
    const scale = (value) => (value === null ? null : log ? (value > 0 ? Math.log10(value) : null) : value);
    let bar = { title: { text: "" }, thickness: 12, outlinewidth: 0, len: 1, x: 1.01, tickfont: { color: colour("grey") } };
    if (log && known.length) {
      const range = [Math.min(...known), Math.max(...known)].map((value) => Math.log10(value));
      const { tickvals, ticktext } = logTicks(range);
      const even = [range[0], (range[0] + range[1]) / 2, range[1]]; // where few round numbers are in sight
      const reach = tickvals?.length > 2 ? (Math.log10(tickvals.at(-1)) - range[0]) / (range[1] - range[0]) : 0;
      bar = reach > 0.8 && tickvals.length < 8
        ? { ...bar, tickmode: "array", tickvals: tickvals.map((value) => Math.log10(value)), ticktext }
        : { ...bar, tickmode: "array", tickvals: even, ticktext: even.map((value) => inWords(Number((10 ** value).toPrecision(2)))) };
    }
    const hover = { text: table((row) => about(row, `${meaning}: <b>${inWords(row.numbers[k])}</b>`)), hovertemplate: "%{text}<extra></extra>" };
    return [
      { ...common, z: table((row) => scale(row.numbers[k])), colorscale: "Viridis", colorbar: bar, ...hover },
      { ...common, z: table((row) => (scale(row.numbers[k]) === null ? 1 : null)), colorscale: [[0, colour("map-refused")], [1, colour("map-refused")]], showscale: false, ...hover },
    ];
  };
  const regimes = () => {
    const step = 1 / labels.length;
    const colorscale = labels.flatMap(({ style }, i) => [[i * step, colour(`map-${style}`)], [(i + 1) * step, colour(`map-${style}`)]]);
    const text = table((row) => about(row, ""));
    const z = table((row) => labels.findIndex(({ name }) => name === row.regime) + 0.5);
    return [{ ...common, z, zmin: 0, zmax: labels.length, colorscale, showscale: false, text, hovertemplate: "%{text}<extra></extra>" }];
  };

  const drawMap = () => {
    const plot = at("chart-map");
    const k = Number(number.value);
    const narrow = plot.clientWidth < 560;
    const size = Math.max(5, Math.min(34, Math.round(560 / layers.length)));
    plot.style.height = `${Math.max(120, layers.length * size) + 34}px`;
    const traces = k < 0 ? regimes() : valuesOf(k);
    const missing = k >= 0 && rows.some((row) => row.numbers[k] === null);
    const legend = k < 0 ? labels.map(({ name, style }) => entry(name, style)) : missing ? [entry("no number: refused, because k̂ is above 0.7, or not to be had", "refused")] : [];
    at("legend").replaceChildren(...legend);
    const { layer, head } = rows[chosen];
    const tick = (count) => ({ tickmode: "linear", tick0: 0, dtick: Math.max(1, Math.ceil(count / (narrow ? 8 : 16))), showgrid: false, zeroline: false, fixedrange: true });
    const layout = {
      ...page.layout(plot, { l: 34, r: k < 0 ? 10 : 62, t: 6, b: 26 }),
      dragmode: false,
      xaxis: { ...tick(heads), range: [-0.5, heads - 0.5] },
      yaxis: { ...tick(layers.length), range: [layers.length - 0.5, -0.5] },
      shapes: [{ type: "rect", x0: head - 0.5, x1: head + 0.5, y0: layer - 0.5, y1: layer + 0.5, line: { color: colour("ink"), width: 2 } }],
    };
    const first = !plot.layout;
    Plotly.react(plot, traces, layout, page.config);
    if (first) plot.on("plotly_click", ({ points: [{ x, y }] }) => go(y, x));
    plot.dataset.drawn = k;
  };

  // One head
  const line = (x, y, name, extra) => ({ type: "scatter", x, y, name, showlegend: false, hovertemplate: `${name}<br>%{x:,.5~g}: %{y:.4~g}<extra></extra>`, ...extra });
  const fromZero = { tickmode: "array", tickvals: [1, 2, 11, 101, 1001, 10001, 100001], ticktext: ["0", "1", "10", "100", "1,000", "10⁴", "10⁵"] };
  const draw = (plot, traces, ticks = {}) => {
    const axes = { xaxis: { ...axis(extent(traces, "x", true), true), ...ticks }, yaxis: axis(extent(traces, "y", true), true) };
    Plotly.react(plot, traces, { ...page.layout(plot), ...axes, dragmode: false }, page.config);
  };
  const drawHead = () => {
    const { details, regime } = rows[chosen];
    const even = 1 / of(rows[chosen], "seen");
    const shifted = details.places.map((place) => place + 1); // for a logarithmic axis
    const hovertemplate = "mean weight<br>position %{customdata:,}: %{y:.4~g}<extra></extra>";
    const [blue, red, grey] = [colour("#0072b2"), colour("#d55e00"), colour("grey")];
    const seen = details.weights.map((weight) => (weight > 0 ? weight : null));
    draw(at("chart-weights"), [
      line([shifted[0], shifted.at(-1)], [even, even], "even share", { mode: "lines", hoverinfo: "skip", hovertemplate: null, line: { color: grey, dash: "dot", width: 1 } }),
      line(shifted, seen, "mean weight", { mode: "lines+markers", line: { color: blue, width: 1.4 }, marker: { size: 4 }, customdata: details.places, hovertemplate }),
    ], fromZero);
    const dash = regime === "refused" ? "dot" : "solid";
    const traces = [line(details.lengths, details.predicted, "predicted", { mode: "lines", line: { color: red, width: 1.6, dash } })];
    if (details.measured) {
      traces.push(line(details.lengths, details.measured, "measured on unseen text", { mode: "markers", marker: { color: blue, size: 7 } }));
    }
    draw(at("chart-error"), traces);
  };

  const word = (place) => words?.[place]?.replaceAll("\n", "↵").replaceAll("\t", "⇥");
  const element = (name, text, style = "") => Object.assign(document.createElement(name), { textContent: text, className: style });
  const around = (place) => {
    const span = element("span", "", "around");
    if (word(place) === undefined) {
      span.append(`token ${place}`);
      return span;
    }
    const join = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, i) => word(from + i) ?? "").join("");
    const own = word(place).trimStart();
    const space = word(place).slice(0, word(place).length - own.length);
    span.append(join(Math.max(0, place - 4), place) + (own ? space : ""), element("mark", own || "␣"), join(place + 1, Math.min(words.length, place + 5)));
    return span;
  };
  const showHead = () => {
    const row = rows[chosen];
    const { details } = row;
    at("title").textContent = `Layer ${row.layer}, head ${row.head}`;
    at("module").textContent = layers[row.layer];
    at("chip").textContent = row.regime;
    at("chip").className = `chip ${labels.find(({ name }) => name === row.regime).style}`;
    at("regime").textContent = row.text;
    const named = (place) => (word(place) === undefined ? `token ${place}` : `“${word(place).trim() || "␣"}” at ${place}`);
    at("sinks").textContent = details.sinks.length ? `Sinks: ${details.sinks.map(named).join(", ")}` : "No sinks.";
    at("error-note").textContent = (row.regime === "refused" ? "The dotted line is a prediction that is refused" : "The line is predicted")
      + (details.measured ? "; points are measured on unseen text." : "; with unseen text errors are measured too.");
    at("carriers").replaceChildren(...details.carriers.map((place, i) => {
      const item = document.createElement("li");
      item.style.setProperty("--share", details.shares[i] / (Math.max(...details.shares) || 1));
      item.append(element("span", place, "place"), around(place), element("span", percent(details.shares[i]), "share"));
      return item;
    }));
    at("values").replaceChildren(...columns.map(({ meaning }, k) => {
      const line = document.createElement("tr");
      line.append(Object.assign(element("th", meaning), { scope: "row" }), element("td", inWords(row.numbers[k])));
      return line;
    }));
    const options = (select, values, value) => {
      select.replaceChildren(...values.map((each) => Object.assign(element("option", each), { value: each })));
      select.value = value;
    };
    options(at("layer"), [...new Set(rows.map((each) => each.layer))], row.layer);
    options(at("head"), rows.filter((each) => each.layer === row.layer).map((each) => each.head), row.head);
    at("back").disabled = chosen === 0;
    at("next").disabled = chosen === rows.length - 1;
    all(".heads tr.chosen").forEach((line) => line.classList.remove("chosen"));
    lines[chosen].classList.add("chosen");
    drawHead();
    at("one").dataset.drawn = keyOf(row.layer, row.head);
  };

  const go = (layer, head) => (location.hash = `head-${layer}-${head}`);
  const step = (by) => {
    const row = rows[chosen + by];
    if (row) show(chosen + by);
  };
  const show = (i) => {
    chosen = i;
    showHead();
    drawMap();
  };
  at("layer").addEventListener("change", ({ target: { value } }) => show(places.get(keyOf(value, rows[chosen].head)) ?? places.get(keyOf(value, 0))));
  at("head").addEventListener("change", ({ target: { value } }) => show(places.get(keyOf(rows[chosen].layer, value))));
  at("back").addEventListener("click", () => step(-1));
  at("next").addEventListener("click", () => step(1));
  number.addEventListener("change", drawMap);
  const arrive = () => {
    const i = places.get(/^#head-(\d+-\d+)$/.exec(location.hash)?.[1]);
    if (i === undefined) return;
    show(i);
    at("one").scrollIntoView();
  };
  addEventListener("hashchange", arrive);

  // The table: sorted by a click, without a number last; and as a file
  const lines = all(".heads tbody tr");
  const values = rows.map((row, i) => [i, labels.findIndex(({ name }) => name === row.regime), ...row.numbers]);
  const heading = all(".heads th[data-column]");
  heading.forEach((head) => head.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heading.forEach((other) => other.setAttribute("aria-sort", other === head ? (up ? "ascending" : "descending") : "none"));
    const value = (i) => values[i][Number(head.dataset.column)];
    const order = (a, b) => (value(a) === null) - (value(b) === null) || (value(a) - value(b)) * (up ? 1 : -1) || a - b;
    document.querySelector(".heads tbody").append(...rows.map((_, i) => i).sort(order).map((i) => lines[i]));
  }));
  at("csv").addEventListener("click", () => {
    const head = ["layer", "head", "regime", ...columns.map(({ name }) => name)];
    const text = [head, ...rows.map((row) => [row.layer, row.head, row.regime, ...row.numbers.map((value) => value ?? "")])];
    const file = URL.createObjectURL(new Blob([text.map((line) => `${line.join(",")}\n`).join("")], { type: "text/csv" }));
    Object.assign(document.createElement("a"), { href: file, download: "inspection.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(file), 1000);
  });

  page.redrawn(() => { drawMap(); drawHead(); });
  show(0);
  arrive();
})();
