"use strict";
// The page without this script is complete but for the charts; all that can be pressed is here.
(() => {
  const { root, all, pressed, press, colour, extent, ticks, axis } = page;

  // Charts
  const charts = JSON.parse(document.getElementById("data").textContent);
  const FLOOR = 1e-300; // in place of what a logarithm cannot show of a band

  const painted = (trace, log) => {
    const { role, label, band, ...rest } = trace;
    const paint = (part) => part && { ...part, color: colour(part.color) };
    const shown = { ...rest, showlegend: false, line: paint(trace.line) };
    if (trace.marker) shown.marker = { ...paint(trace.marker), line: paint(trace.marker.line) };
    if (trace.error_y) shown.error_y = paint(trace.error_y);
    if (band) {
      shown.fillcolor = colour(trace.fillcolor);
      if (log) shown.y = trace.y.map((value) => (value !== null && value <= 0 ? FLOOR : value));
    }
    return shown;
  };

  // Cells have names for places, and stay where they are.
  const drawCells = (plot, trace) => {
    const named = { type: "category", fixedrange: true, showgrid: false, zeroline: false, tickangle: 0 };
    const layout = { ...page.layout(plot), dragmode: false, xaxis: named, yaxis: named };
    Plotly.react(plot, [{ ...trace, textfont: { size: 11 } }], layout, page.config);
  };

  class Figure {
    constructor(article) {
      this.article = article;
      this.panels = charts[article.dataset.figure];
      this.plots = all(".plot", article);
      this.asked = {}; // axes whose type a reader chose
      article.addEventListener("click", (event) => {
        const button = event.target.closest("button[aria-pressed]");
        if (!button) return;
        press(button, !pressed(button));
        if (button.dataset.log) this.asked[button.dataset.log] = pressed(button);
        if (button.dataset.role) {
          all(`.legend [data-of="${button.dataset.role}"]`, article).forEach((entry) => (entry.hidden = !pressed(button)));
        }
        this.draw();
      });
      this.zooming = false;
    }

    // After a zoom, ticks for what is in sight.
    zoomed(plot) {
      const change = {};
      for (const name of ["xaxis", "yaxis"]) {
        const { range, type, tickmode } = plot.layout[name];
        if (tickmode === "linear") continue; // whole numbers
        for (const [key, value] of Object.entries(ticks(range, type === "log"))) change[`${name}.${key}`] = value;
      }
      this.zooming = true;
      Plotly.relayout(plot, change).then(() => (this.zooming = false));
    }

    draw() {
      const off = (name) => new Set(all(`button[aria-pressed="false"][data-${name}]`, this.article).map((b) => b.dataset[name]));
      const [roles, labels] = [off("role"), off("label")];
      const log = (panel, name) => this.asked[name] ?? panel[name].log;
      const visible = this.panels.map((panel) => (panel.traces ?? []).filter((t) => !roles.has(t.role) && !labels.has(t.label)));
      all(".legend svg", this.article).forEach((swatch) => (swatch.style.stroke = colour(swatch.dataset.colour)));
      this.panels.forEach((panel, i) => {
        if (panel.cells) return drawCells(this.plots[i], panel.cells);
        const [xlog, ylog] = [log(panel, "x"), log(panel, "y")];
        const common = this.panels.flatMap((other, j) =>
          j === i || (panel.row !== null && other.row === panel.row && other.traces && log(other, "y") === ylog) ? visible[j] : []);
        const layout = {
          ...page.layout(this.plots[i]),
          xaxis: { ...axis(extent(visible[i], "x", xlog), xlog), ...(panel.x.whole && !xlog && { tickmode: "linear", tick0: 0, dtick: 1 }) },
          yaxis: axis(extent(common, "y", ylog), ylog),
        };
        const plot = this.plots[i];
        const first = !plot.layout;
        Plotly.react(plot, visible[i].map((trace) => painted(trace, ylog)), layout, page.config);
        if (first) {
          plot.on("plotly_relayout", () => this.zooming || this.zoomed(plot));
          plot.on("plotly_doubleclick", () => this.draw());
        }
      });
      this.article.dataset.drawn = this.width = this.plots[0]?.clientWidth ?? 0;
    }
  }

  const figures = all("article[data-figure]").map((article) => new Figure(article));
  const waiting = [...figures];
  const drawNext = () => {
    waiting.shift()?.draw();
    if (waiting.length) setTimeout(drawNext); // the page answers between two figures
  };
  const redraw = () => figures.filter((figure) => !waiting.includes(figure)).forEach((figure) => figure.draw());
  let resizing;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => figures.forEach((f) => f.width !== f.plots[0]?.clientWidth && !waiting.includes(f) && f.draw()), 80);
  });

  page.onTheme(redraw);

  // Ledger: open, filter, sort
  const table = document.querySelector(".claims");
  const bodies = all("tbody[data-verdict]", table);
  const toggles = all("button.key", table);
  const more = (toggle) => document.getElementById(toggle.getAttribute("aria-controls"));
  const open = (toggle, on) => {
    toggle.setAttribute("aria-expanded", String(on));
    if (on) more(toggle).removeAttribute("hidden");
    else more(toggle).setAttribute("hidden", "until-found");
  };
  const isOpen = (toggle) => toggle.getAttribute("aria-expanded") === "true";
  const everything = document.getElementById("open-all");
  toggles.forEach((toggle) => {
    toggle.addEventListener("click", () => open(toggle, !isOpen(toggle)));
    more(toggle).addEventListener("beforematch", () => open(toggle, true));
  });
  everything.addEventListener("click", () => {
    press(everything, !pressed(everything));
    everything.textContent = pressed(everything) ? "Close all" : "Open all";
    toggles.forEach((toggle) => open(toggle, pressed(everything)));
  });

  const filters = all(".filters button");
  const chosen = {}; // a verdict and a role, or none
  const filter = (change) => {
    Object.assign(chosen, change);
    filters.forEach(({ dataset: { verdict, role } }, i) =>
      press(filters[i], verdict ? chosen.verdict === verdict : role ? chosen.role === role : !chosen.verdict && !chosen.role));
    bodies.forEach((body) => (body.hidden = ["verdict", "role"].some((name) => chosen[name] && body.dataset[name] !== chosen[name])));
    const count = bodies.filter((body) => !body.hidden).length;
    document.getElementById("shown").textContent = `${count} of ${bodies.length} claims shown`;
  };
  const none = { verdict: undefined, role: undefined };
  filters.forEach((button) => button.addEventListener("click", () => {
    const { verdict, role } = button.dataset;
    if (verdict) filter({ verdict: pressed(button) ? undefined : verdict });
    else if (role) filter({ role: pressed(button) ? undefined : role });
    else filter(none);
  }));
  all(".count").forEach((count) => count.addEventListener("click", () => filter({ verdict: count.dataset.verdict, role: "test" })));
  filter(none);

  const natural = new Intl.Collator("en", { numeric: true }).compare;
  const cell = (body, name) => body.querySelector(`tr > .${name}`).dataset.sort;
  const heads = all("th[data-column]", table);
  heads.forEach((head) => head.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach((other) => other.setAttribute("aria-sort", other === head ? (up ? "ascending" : "descending") : "none"));
    const name = head.dataset.column;
    const order = (a, b) => natural(cell(a, name), cell(b, name)) * (up ? 1 : -1) || natural(cell(a, "key"), cell(b, "key"));
    table.append(...bodies.sort(order));
  }));

  // A link to a claim shows it, filtered out or not, and opens it
  const arrive = () => {
    const body = bodies.find((candidate) => `#${candidate.id}` === decodeURIComponent(location.hash));
    if (!body) return;
    if (body.hidden) filter(none);
    open(body.querySelector("button.key"), true);
    body.scrollIntoView();
  };
  addEventListener("hashchange", arrive);

  // Copying
  all(".copy").forEach((button) => button.addEventListener("click", async () => {
    const line = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(line.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(line); // the reader copies by hand
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }));

  // Print: on white, at the paper's width, with all that can be opened open
  let opened = [];
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    opened = [...all("details:not([open])"), ...toggles.filter((toggle) => !isOpen(toggle))];
    opened.forEach((part) => (part.localName === "details" ? (part.open = true) : open(part, true)));
    waiting.length = 0;
    figures.forEach((figure) => figure.draw());
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    opened.forEach((part) => (part.localName === "details" ? (part.open = false) : open(part, false)));
    redraw();
  });

  arrive();
  drawNext();
})();
