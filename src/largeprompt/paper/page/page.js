"use strict";
// What the pages of this package have in common: colours of the paper of the moment, axes, light and dark, where the reader is.
const page = (() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const pressed = (button) => button.getAttribute("aria-pressed") === "true";
  const press = (button, on) => button.setAttribute("aria-pressed", String(on));

  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => {
    if (root.classList.contains("printing")) return false;
    return (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  };

  // Colours: CSS has them, and a probe resolves a name for the paper of the moment. Curves too dark for dark paper
  // are mixed with white until they stand out from it.
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  const channels = (text) => text.match(/[\d.]+/g).slice(0, 3).map(Number);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const colour = (name) => {
    probe.style.color = name.startsWith("#") ? name : `var(--${name})`;
    let rgb = channels(getComputedStyle(probe).color);
    if (name.startsWith("#") && dark()) {
      while (luminance(rgb) < 0.13) rgb = rgb.map((c) => Math.round(c + (255 - c) * 0.1));
    }
    return `rgb(${rgb.join(", ")})`;
  };

  // Axes
  const extent = (traces, axis, log) => {
    let [low, high] = [Infinity, -Infinity];
    const see = (value) => {
      if (value === null || (log && value <= 0)) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    };
    for (const trace of traces) {
      trace[axis].forEach(see);
      if (axis === "y" && trace.error_y) trace.customdata.flat().forEach(see);
    }
    if (low > high) return log ? [-1, 1] : [0, 1];
    if (log) [low, high] = [Math.log10(low), Math.log10(high)];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low - room, high + room];
  };

  // Ticks of a logarithm: powers of ten, with 2 and 5 or all digits between where few powers are in sight.
  const power = (exponent) => `10<sup>${String(exponent).replace("-", "−")}</sup>`;
  const logTicks = ([low, high]) => {
    const span = high - low;
    const digits = span > 2 ? [1] : span > 0.7 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 7, 8, 9];
    const step = Math.max(1, Math.ceil(span / 6));
    const ticks = [];
    for (let exponent = Math.floor(low); exponent <= high; exponent++) {
      if (exponent % step) continue;
      for (const digit of digits) {
        const place = exponent + Math.log10(digit);
        if (place >= low && place <= high) ticks.push([digit, exponent]);
      }
    }
    if (ticks.length < 2) return {}; // deep in a zoom, as Plotly has them
    const plain = ticks.every(([, exponent]) => exponent >= -2 && exponent <= 4);
    const text = ([digit, exponent]) => {
      if (plain) return exponent < 0 ? (digit * 10 ** exponent).toFixed(-exponent) : (digit * 10 ** exponent).toLocaleString("en");
      return digit === 1 ? power(exponent) : `${digit}×${power(exponent)}`;
    };
    return { tickmode: "array", tickvals: ticks.map(([digit, exponent]) => digit * 10 ** exponent), ticktext: ticks.map(text) };
  };
  const ticks = (range, log) => {
    if (log) return { tickmode: "auto", ...logTicks(range) };
    return { tickmode: "auto", tickformat: Math.max(...range.map(Math.abs)) >= 1e4 ? "~s" : "" };
  };

  const axis = (range, log) => ({
    type: log ? "log" : "linear",
    range,
    gridcolor: colour("grid"),
    linecolor: colour("rule"),
    showline: true,
    zeroline: false,
    tickangle: 0,
    nticks: 6,
    exponentformat: "power",
    ...ticks(range, log),
  });

  const layout = (plot, margin = { l: 50, r: 10, t: 6, b: 24 }) => ({
    width: plot.clientWidth,
    height: plot.clientHeight,
    margin,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 11.5, color: colour("grey") },
    hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("rule"), font: { color: colour("ink"), size: 12 }, align: "left" },
    hovermode: "closest",
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
  });
  const config = { displayModeBar: false, doubleClick: false, showTips: false };

  // Light and dark
  let changed = () => {}; // what a page draws again in other colours
  const theme = document.getElementById("theme");
  const kept = { get: () => null, set: () => {} };
  try {
    localStorage.getItem("largeprompt-theme");
    kept.get = () => localStorage.getItem("largeprompt-theme");
    kept.set = (value) => localStorage.setItem("largeprompt-theme", value);
  } catch { /* a browser may refuse to keep anything for a file */ }
  const showTheme = () => press(theme, dark());
  if (kept.get()) root.dataset.theme = kept.get();
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    kept.set(root.dataset.theme);
    showTheme();
    changed();
  });
  system.addEventListener("change", () => { showTheme(); changed(); });
  showTheme();

  // Draw again when colours, width or paper change
  const redrawn = (draw) => {
    changed = draw;
    let resizing;
    addEventListener("resize", () => {
      clearTimeout(resizing);
      resizing = setTimeout(draw, 80);
    });
    addEventListener("beforeprint", () => { root.classList.add("printing"); draw(); });
    addEventListener("afterprint", () => { root.classList.remove("printing"); draw(); });
  };

  // Where the reader is
  const links = new Map(all("nav > ul > li > a").map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    links.forEach((link) => link.removeAttribute("aria-current"));
    links.get(entry.target.id)?.setAttribute("aria-current", "true");
  }), { rootMargin: "-30% 0px -60% 0px" });
  all("main > section").forEach((section) => seen.observe(section));

  return { root, all, pressed, press, dark, colour, extent, logTicks, ticks, axis, layout, config, redrawn, onTheme: (draw) => (changed = draw) };
})();
