(() => {
  const { colour, axis, extent } = page;
  const at = (id) => document.getElementById(id);
  const { rows, classes, now, curve, band } = JSON.parse(at("data").textContent);
  const signed = (value) => `${value < 0 ? "−" : "+"}${Number(Math.abs(value).toPrecision(2))}`;
  const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // in Plotly's words some tags mean something
  const cell = (name, text) => Object.assign(document.createElement(name), { textContent: text });
  const inOrder = rows.map((_, i) => i).sort((a, b) => rows[a].probability - rows[b].probability);
  const places = inOrder.map((_, place) => place);
  let chosen = inOrder.at(-1);

  // Points with bars from `low` to `high`; red where the prediction is wrong, hollow where it is not to be trusted.
  const points = (value, low, high, text) => {
    const chosenRows = inOrder.map((i) => rows[i]);
    const colours = chosenRows.map((row) => colour(row.true === row.predicted ? "#0072b2" : "#d55e00"));
    return {
      type: "scatter", mode: "markers", x: places, y: chosenRows.map(value), showlegend: false,
      error_y: {
        type: "data", symmetric: false, thickness: 1.2, width: 0, color: colour("grey"),
        array: chosenRows.map((row) => high(row) - value(row)), arrayminus: chosenRows.map((row) => value(row) - low(row)),
      },
      customdata: chosenRows.map((row) => [low(row), high(row)]),
      marker: { size: 8, color: colours, symbol: chosenRows.map((row) => (row.trusted ? "circle" : "circle-open")), line: { width: 1.5, color: colours } },
      text: chosenRows.map(text), hovertemplate: "%{text}<extra></extra>",
    };
  };
  const about = (row) => `line ${row.line}: ${escaped(row.predicted)}, ${percent(row.probability)} (${percent(row.low)} to ${percent(row.high)})<br>true class ${escaped(row.true)}`;
  const level = (x, y) => ({ type: "scatter", mode: "lines", x, y, hoverinfo: "skip", showlegend: false, line: { color: colour("grey"), dash: "dot", width: 1 } });

  const draw = (plot, traces, xaxis, yaxis) => {
    const first = !plot.layout;
    Plotly.react(plot, traces, { ...page.layout(plot), dragmode: false, xaxis, yaxis }, page.config);
    return first;
  };
  const drawIntervals = () => {
    const plot = at("chart-intervals");
    const ring = { type: "scatter", mode: "markers", x: [inOrder.indexOf(chosen)], y: [rows[chosen].probability], hoverinfo: "skip", showlegend: false, marker: { size: 17, symbol: "circle-open", color: colour("ink") } };
    const traces = [points((row) => row.probability, (row) => row.low, (row) => row.high, about), ring];
    const across = { ...axis([-0.7, rows.length - 0.3], false), showticklabels: false, showgrid: false };
    if (draw(plot, traces, across, axis([-0.03, 1.03], false))) {
      plot.on("plotly_click", ({ points: [point] }) => show(inOrder[point.x]));
    }
    plot.dataset.drawn = chosen;
  };
  const drawCurve = () => {
    const red = colour("#d55e00");
    const line = (y, extra) => ({ type: "scatter", mode: "lines", x: band.rows, y, showlegend: false, hovertemplate: "%{x:,.0f} rows: %{y:.3f}<extra></extra>", line: { color: red, width: 1.6 }, ...extra });
    const edge = { line: { width: 0 }, hoverinfo: "skip", hovertemplate: null };
    const measured = {
      type: "scatter", mode: "markers", x: curve.rows, y: curve.score, showlegend: false, marker: { color: colour("#0072b2"), size: 7 },
      error_y: { type: "data", array: curve.spread, thickness: 1.2, width: 0 }, customdata: curve.score.map((score, i) => [score - curve.spread[i], score + curve.spread[i]]),
      hovertemplate: "%{x:,} rows: %{y:.3f}<extra></extra>",
    };
    const traces = [line(band.low, edge), line(band.high, { ...edge, fill: "tonexty", fillcolor: red.replace("rgb", "rgba").replace(")", ", 0.15)") }), line(band.score), measured];
    const range = extent(traces, "y", false);
    draw(at("chart-curve"), [...traces, level([now, now], range)], axis(extent(traces, "x", true), true), axis(range, false));
  };
  const drawNeeded = () => {
    if (!at("chart-needed")) return;  // no number is known
    const text = (row) => `line ${row.line}: ${Math.round(row.rows_needed).toLocaleString("en")} rows<br>(${Math.round(row.rows_low).toLocaleString("en")} to ${Math.round(row.rows_high).toLocaleString("en")})`;
    const known = points((row) => row.rows_needed, (row) => row.rows_low, (row) => row.rows_high, text);
    const ends = [-0.7, rows.length - 0.3];
    const range = extent([known, { x: [], y: [now] }], "y", true);
    draw(at("chart-needed"), [known, level(ends, [now, now])], { ...axis(ends, false), showticklabels: false, showgrid: false }, axis(range, true));
  };

  const show = (i) => {
    chosen = i;
    const row = rows[i];
    at("name").textContent = `The row on line ${row.line}`;
    at("row").value = i;
    at("cells").textContent = row.cells;
    const doubt = row.trusted ? "" : ` The interval is not to be trusted: ${row.reason}.`;
    at("said").textContent = `Predicted ${row.predicted} with probability ${percent(row.probability)}, over redraws ${percent(row.low)} to ${percent(row.high)}; the true class is ${row.true}.${doubt}`;
    at("influential").replaceChildren(...row.influential.map((each) => {
      const line = document.createElement("tr");
      line.append(cell("td", each.line), cell("td", each.class), cell("td", signed(each.change)), cell("td", each.cells));
      return line;
    }));
    at("classes").replaceChildren(...classes.map((name, c) => {
      const line = document.createElement("tr");
      line.append(Object.assign(cell("th", name), { scope: "row" }), cell("td", percent(row.probabilities[c])));
      return line;
    }));
    drawIntervals();
  };
  at("row").replaceChildren(...rows.map((row, i) => Object.assign(cell("option", `line ${row.line}: ${row.predicted}`), { value: i })));
  at("row").addEventListener("change", ({ target: { value } }) => show(Number(value)));
  page.redrawn(() => { drawIntervals(); drawCurve(); drawNeeded(); });
  show(chosen);
  drawCurve();
  drawNeeded();
})();
