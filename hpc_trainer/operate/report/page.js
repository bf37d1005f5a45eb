"use strict";
// Texts of users reach the page only as data: elements get them by textContent, charts by `esc`. Nothing is evaluated.
(async () => {
  const started = performance.now();
  const FIRST_ROWS = 25;
  const byId = (id) => document.getElementById(id);
  const bytesOf = (id) => {
    const binary = atob(byId(id).textContent.trim());
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
  };
  if (typeof DecompressionStream === "undefined") {
    byId("app").textContent = "This browser is too old for this page. hpc-trainer report --plain writes one without scripts.";
    return;
  }
  const data = JSON.parse(await bytesOf("data").text());
  const words = await bytesOf("numbers").arrayBuffer();
  const floats = new Float32Array(words), whole = new Uint32Array(words);
  const { runs, columns } = data;

  // --- elements ---

  /** Return an element; `properties` are set as such, `children` are elements or texts. */
  const el = (name, properties = {}, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key.startsWith("aria") || key === "role" || key === "scope" || key.startsWith("data-")) element.setAttribute(key, value);
      else element[key] = value;
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  };
  /** Return a text for a chart's own markup, in which `<b>` would be bold. */
  const esc = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  /** Return a name in parts that may stand in lines of their own. */
  const breakable = (name) => name.split(/(?<=[._/])/).flatMap((part) => [part, el("wbr")]);
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
  const shown = (value) => {
    if (value === null || value === undefined) return "-";
    if (typeof value !== "number") return String(value);
    const text = String(Number.isInteger(value) && Math.abs(value) < 1e15 ? value : Number(value.toPrecision(5)));
    const short = Number(text).toExponential().replace("+", "");
    return Math.abs(value) >= 1e6 && short.length < text.length ? short : text;
  };
  const label = (run) => {
    const name = data.axes.filter((axis) => run.cells[axis] !== undefined && run.cells[axis] !== null)
      .map((axis) => `${axis.split(".").pop()}=${shown(run.cells[axis])}`).join(" ") || run.id;
    return data.sweeps.length > 1 ? `${data.sweeps[run.sweep].name}: ${name}` : name;
  };
  const labels = runs.map(label);

  // --- colours: a run has the same one in the table and in every chart ---

  let theme = "light";
  let isChosen = false;
  const hex = (hue, saturation, lightness) => {
    const part = (n) => {
      const k = (n + hue / 30) % 12;
      const value = lightness - saturation * Math.min(lightness, 1 - lightness) * Math.max(-1, Math.min(k - 3, 9 - k, 1));
      return Math.round(255 * value).toString(16).padStart(2, "0");
    };
    return `#${part(0)}${part(8)}${part(4)}`;
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (index) => (runs.length <= 8 ? css(`--c${index}`)
    : hex((210 + index * 137.508) % 360, 0.6 + 0.1 * (index % 3), theme === "dark" ? 0.68 - 0.05 * (index % 2) : 0.4 - 0.06 * (index % 2)));

  // --- state ---

  const metricNames = columns.filter((column) => column.kind === "metric").map((column) => column.name);
  const curveNames = Object.keys(data.curves);
  const state = {
    sort: data.sort, isUp: data.is_up, filters: {}, search: "", off: new Set(), all: false,
    columns: new Set(columns.filter((column) => column.shown).map((column) => column.name)),
    most: 50, smooth: 0, logX: false, logY: false, band: "", metric: data.metric || metricNames[0] || curveNames[0] || "",
    pair: [], run: data.first,
  };

  // --- the address keeps what a user chose: a reload has it too, and so has whoever gets the address ---

  const usual = { ...state, columns: [...state.columns].join("\n") };
  const MOST = ["10", "20", "50", "100", "1000000"];
  const keyOf = (run) => (data.sweeps.length > 1 ? `${data.sweeps[run.sweep].name}/${run.id}` : run.id);
  const recall = () => {
    const kept = new URLSearchParams(location.hash.slice(1)), names = columns.map((column) => column.name);
    state.search = kept.get("search") || "";
    state.filters = Object.fromEntries(names.filter((name) => kept.get(`filter.${name}`)).map((name) => [name, kept.get(`filter.${name}`)]));
    if (kept.has("column")) state.columns = new Set(kept.getAll("column").filter((name) => names.includes(name)));
    for (const name of Object.keys(state.filters)) state.columns.add(name);
    if (names.includes(kept.get("sort"))) { state.sort = kept.get("sort"); state.isUp = kept.has("up"); }
    const places = new Map(runs.map((run, index) => [keyOf(run), index]));
    state.off = new Set(kept.getAll("off").filter((key) => places.has(key)).map((key) => places.get(key)));
    state.run = places.get(kept.get("run")) ?? state.run;
    if (MOST.includes(kept.get("runs"))) state.most = Number(kept.get("runs"));
    if (Number(kept.get("smooth")) > 0) state.smooth = Math.min(0.99, Number(kept.get("smooth")));
    [state.logX, state.logY] = ["x", "y"].map((axis) => kept.getAll("log").includes(axis));
    if (data.axes.includes(kept.get("band"))) state.band = kept.get("band");
    if (metricNames.includes(kept.get("metric"))) state.metric = kept.get("metric");
    state.pair = kept.getAll("axis");
  };
  const keep = () => {
    const kept = new URLSearchParams();
    if (state.search) kept.set("search", state.search);
    for (const [name, filter] of Object.entries(state.filters)) if (filter.trim()) kept.set(`filter.${name}`, filter);
    if (state.sort !== usual.sort || state.isUp !== usual.isUp) { kept.set("sort", state.sort); if (state.isUp) kept.set("up", "yes"); }
    if ([...state.columns].join("\n") !== usual.columns) for (const name of state.columns) kept.append("column", name);
    for (const index of state.off) kept.append("off", keyOf(runs[index]));
    if (state.run !== usual.run) kept.set("run", keyOf(runs[state.run]));
    if (state.most !== usual.most) kept.set("runs", state.most);
    if (state.smooth) kept.set("smooth", state.smooth);
    if (state.logX) kept.append("log", "x");
    if (state.logY) kept.append("log", "y");
    if (state.band) kept.set("band", state.band);
    if (state.metric !== usual.metric) kept.set("metric", state.metric);
    if (state.pair.join("\n") !== usual.pair.join("\n")) for (const name of state.pair) kept.append("axis", name);
    const text = kept.toString();
    if (text !== location.hash.slice(1) && (text || location.hash.includes("="))) history.replaceState(null, "", `#${text}`);
  };
  recall();

  const operators = {
    ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b,
    "=": (a, b) => a === b, "!=": (a, b) => a !== b,
  };
  /** Return True if a cell fits a filter: `>1e-3`, `>=1 <5`, `1..5`, `=x`, `=x|y`, `!=x`, or a part of its text. */
  const fits = (cell, filter) => {
    const asked = filter.trim();
    if (!asked) return true;
    const range = asked.match(/^(-?[\d.]+(?:e[-+]?\d+)?)\.\.(-?[\d.]+(?:e[-+]?\d+)?)$/i);
    const number = cell === null || cell === undefined || cell === "" ? NaN : Number(cell);
    if (range) return number >= Number(range[1]) && number <= Number(range[2]);
    if (/^=[^=]/.test(asked) && asked.slice(1).split("|").some((one) => one === shown(cell) || (one.trim() && Number(one) === number))) return true;
    const tests = asked.split(/\s+/);
    if (tests.every((test) => /^(>=|<=|!=|=|>|<)./.test(test))) {
      return tests.every((test) => {
        const [, sign, value] = test.match(/^(>=|<=|!=|=|>|<)(.*)$/);
        if (Number.isNaN(Number(value)) || (Number.isNaN(number) && sign.endsWith("=") && sign.length < 3 && !/[<>]/.test(sign))) {
          return /[<>]/.test(sign) ? false : operators[sign](shown(cell), value);
        }
        return operators[sign](number, Number(value));
      });
    }
    return shown(cell).toLowerCase().includes(asked.toLowerCase());
  };
  const compare = (a, b) => {
    const x = runs[a].cells[state.sort], y = runs[b].cells[state.sort];
    const hasX = x !== null && x !== undefined, hasY = y !== null && y !== undefined;
    if (!hasX || !hasY) return hasX ? -1 : hasY ? 1 : a - b;
    const order = isNumber(x) && isNumber(y) ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return (state.isUp ? order : -order) || a - b;
  };
  const filtered = () => {
    const search = state.search.toLowerCase();
    const asked = Object.entries(state.filters).filter(([, filter]) => filter.trim());
    return runs.map((_, index) => index).filter((index) => {
      const run = runs[index];
      return asked.every(([name, filter]) => fits(run.cells[name], filter))
        && (!search || Object.values(run.cells).some((cell) => shown(cell).toLowerCase().includes(search)));
    }).sort(compare);
  };
  let visible = filtered();
  const drawn = () => visible.filter((index) => !state.off.has(index)).slice(0, state.most);

  // --- charts, drawn when they come into view ---

  const panels = [];
  let plotly = null;
  // A printed chart is drawn in these pixels and scaled to the width of the paper, whatever the window's size is.
  const PAPER = { high: { width: 690, height: 400 }, low: { width: 340, height: 260 } };
  let isPaper = false;
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const panel = panels.find((one) => one.box === entry.target);
      if (panel) { panel.isNear = entry.isIntersecting; if (panel.isNear) drawPanel(panel); }
    }
  }, { rootMargin: "300px" });
  const drawPanel = (panel) => {
    if (!plotly || !panel.isDirty) return;
    panel.isDirty = false;
    panel.box.dataset.fresh = "yes";
    const made = panel.make();
    if (!made || !made.traces.length) {
      if (panel.isDrawn) { plotly.purge(panel.box); panel.isDrawn = false; }
      panel.box.classList.add("wait");
      panel.box.textContent = "nothing to draw: no value, or no run is chosen";
      return;
    }
    if (!panel.isDrawn) { panel.box.textContent = ""; panel.box.classList.remove("wait"); }
    const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--soft"), automargin: true };
    const layout = {
      autosize: true, showlegend: false, hovermode: "closest", margin: { l: 50, r: 14, t: 26, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("--ink"), size: 12, family: "system-ui, sans-serif" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--rest"), activecolor: css("--ink") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: -1 },
      ...made.layout, xaxis: { ...axis, ...(made.layout || {}).xaxis }, yaxis: { ...axis, ...(made.layout || {}).yaxis },
    };
    const paper = isPaper ? { ...PAPER[panel.high ? "high" : "low"], ...(made.height ? { height: made.height } : {}) } : null;
    if (paper) { Object.assign(layout, { autosize: false, ...paper }); panel.box.style.setProperty("--shape", `${paper.width}/${paper.height}`); }
    panel.box.style.height = made.height ? `${made.height}px` : "";
    plotly.react(panel.box, made.traces, layout, {
      displaylogo: false, responsive: true, showTips: false,
      // Named one by one: plotly's own choice has a button that sends the chart to its company.
      modeBarButtons: [panel.brushed ? ["toImage"] : ["toImage", "zoom2d", "pan2d", "autoScale2d", "resetScale2d"]],
    });
    for (const svg of panel.box.querySelectorAll(".main-svg")) {
      if (paper) svg.setAttribute("viewBox", `0 0 ${paper.width} ${paper.height}`); else svg.removeAttribute("viewBox");
    }
    if (!panel.isDrawn) {
      panel.isDrawn = true;
      panel.box.on("plotly_click", (event) => {
        const index = event.points[0].customdata ?? (event.points[0].data.meta || {}).run;
        if (isNumber(index)) chooseRun(index);
      });
      // After plotly's own end of the drag: the filter draws the chart anew.
      if (panel.brushed) panel.box.on("plotly_selected", (event) => { if (event && event.range) setTimeout(() => panel.brushed(event.range)); });
    }
  };
  const redraw = (all = false) => {
    for (const panel of panels) { panel.isDirty = true; delete panel.box.dataset.fresh; if (all || panel.isNear) drawPanel(panel); }
  };
  /** Return a figure whose chart `make` returns as traces and layout; `brushed` gets the range that a user drags over. */
  const figure = (title, make, { high = false, note = "", brushed = null } = {}) => {
    const box = el("div", { className: `plot wait${high ? " high" : ""}`, role: "img", "aria-label": title }, "..");
    const panel = { box, make, high, brushed, isDirty: true, isNear: false, isDrawn: false };
    panels.push(panel);
    observer.observe(box);
    return el("figure", {}, el("h3", {}, title), note ? el("p", { className: "soft" }, note) : null, box);
  };
  const forget = (node) => {
    for (const box of node.querySelectorAll(".plot")) {
      const at = panels.findIndex((panel) => panel.box === box);
      if (at >= 0) { if (panels[at].isDrawn) plotly.purge(box); observer.unobserve(box); panels.splice(at, 1); }
    }
    node.replaceChildren();
  };
  const section = (id, title, ...children) => el("section", { id }, el("h2", {}, title), ...children);
  const option = (value, text, isChosenOne) => el("option", { value, selected: isChosenOne }, text);
  const select = (title, values, chosen, change) => {
    const box = el("select", { onchange: (event) => change(event.target.value) },
      ...values.map(([value, text]) => option(value, text, value === chosen)));
    return el("label", {}, title, box);
  };
  const check = (title, chosen, change) => el("label", {},
    el("input", { type: "checkbox", checked: chosen, onchange: (event) => change(event.target.checked) }), title);
  const table = (heads, rows) => el("div", { className: "wide" }, el("table", {},
    el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head))),
    ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell))))));
  const swatch = (index) => {
    const box = el("span", { className: "swatch", "data-run": index });
    box.style.background = colour(index);
    return box;
  };

  // --- summary ---

  const tone = (name) => (name === "COMPLETED" ? "good" : data.bad.includes(name) ? "bad" : name === "RUNNING" ? "" : "wait");
  const tile = (title, value, more = "") => el("div", { className: "tile" }, el("span", { className: "soft" }, title), el("b", {}, value), more);
  const total = (name) => runs.reduce((sum, run) => sum + (isNumber(run.cells[name]) ? run.cells[name] : 0), 0);
  const summary = () => {
    const counts = {};
    for (const run of runs) counts[run.cells.state] = (counts[run.cells.state] || 0) + 1;
    const chips = Object.entries(counts).sort().map(([name, count]) => el("span", { className: `chip ${tone(name)}` }, `${count} ${name}`));
    const best = data.best === null ? null : runs[data.best];
    const spent = runs.reduce((sum, run) => sum + (run.ledger ? run.ledger.elapsed_s * run.gpus : 0), 0);
    const useful = runs.reduce((sum, run) => sum + (run.ledger ? run.ledger.good_s * run.gpus : 0), 0);
    const wall = runs.reduce((sum, run) => sum + (run.ledger ? run.ledger.elapsed_s : 0), 0);
    const good = runs.reduce((sum, run) => sum + (run.ledger ? run.ledger.good_s : 0), 0);
    const goodput = spent > 0 ? useful / spent : wall > 0 ? good / wall : null;
    const hours = total("gpu_hours");
    return el("div", {}, el("p", {}, ...chips), el("div", { className: "tiles" },
      tile("runs", String(runs.length)),
      best === null ? null : tile(`best ${data.metric}`, shown(best.cells[data.metric]), labels[data.best]),
      hours > 0 ? tile("GPU-hours", shown(Number(hours.toPrecision(4)))) : tile("core-hours", shown(Number(total("core_hours").toPrecision(4)))),
      goodput === null ? null : tile("goodput", `${(100 * goodput).toFixed(1)}%`, "time in steps that lasted"),
      tile("attempts", shown(total("attempts")))),
    ...data.sweeps.flatMap((sweep) => sweep.notes.map((note) => el("p", { className: "note" }, note))),
    ...data.sweeps.filter((sweep) => sweep.advice.length).map((sweep) => el("div", { className: "group" }, el("b", {}, "Advice"),
      el("ul", {}, ...sweep.advice.map((line) => el("li", {}, line))),
      sweep.next ? el("code", {}, `hpc-trainer ${sweep.next}`) : null)));
  };

  // --- table ---

  const tableBox = el("table", { className: "runs-table" });
  const count = el("span", { className: "soft", role: "status", "aria-live": "polite" });
  const onPaper = el("p", { className: "soft onprint" });
  const sortBy = (name) => {
    const column = columns.find((one) => one.name === name);
    state.isUp = state.sort === name ? !state.isUp : column.up;
    state.sort = name;
    update();
    tableBox.querySelector(`[data-column="${CSS.escape(name)}"]`).focus();  // the head is new
  };
  const title = (column) => [...breakable(column.name), state.sort === column.name ? (state.isUp ? " ▲" : " ▼") : ""];
  const head = () => {
    const chosen = columns.filter((column) => state.columns.has(column.name));
    const titles = el("tr", {}, el("th", { scope: "col" }), ...chosen.map((column) => el("th", {
      scope: "col", className: column.num ? "num" : "", "aria-sort": state.sort !== column.name ? "none" : state.isUp ? "ascending" : "descending",
    }, el("button", { type: "button", onclick: () => sortBy(column.name), "data-column": column.name }, ...title(column)),
    el("span", { className: "onprint" }, ...title(column)))));  // a head that is repeated on a page of paper lacks its buttons
    const filters = el("tr", { className: "filters" }, el("th", {}), ...chosen.map((column) => el("th", {}, el("input", {
      type: "search", value: state.filters[column.name] || "", placeholder: column.num ? ">1" : "text",
      "aria-label": `filter ${column.name}`, "data-filter": column.name,
      oninput: (event) => { state.filters[column.name] = event.target.value; update(false); },
    }))));
    return el("thead", {}, titles, filters);
  };
  const body = () => {
    const chosen = columns.filter((column) => state.columns.has(column.name));
    const rows = state.all ? visible : visible.slice(0, FIRST_ROWS);
    return el("tbody", {}, ...rows.map((index) => {
      const run = runs[index];
      const box = el("input", {
        type: "checkbox", checked: !state.off.has(index), "aria-label": `draw ${run.id}`,
        onchange: (event) => {
          if (event.target.checked) state.off.delete(index); else state.off.add(index);
          event.target.closest("tr").classList.toggle("off", !event.target.checked);
          redraw();
          keep();
        },
      });
      const mark = el("td", {}, swatch(index), box);
      mark.style.whiteSpace = "nowrap";
      return el("tr", { className: state.off.has(index) ? "off" : "", "data-run": index }, mark, ...chosen.map((column) => {
        const value = run.cells[column.name];
        if (column.name === "run_id") {
          return el("td", { className: "id" }, el("button", { type: "button", onclick: () => { chooseRun(index); byId("run").scrollIntoView(); byId("chosen-run").focus({ preventScroll: true }); } }, ...run.id.split(/(?<=[-_])/).flatMap((part) => [part, el("wbr")])));
        }
        return el("td", { className: column.name === "state" ? `state ${tone(value)}` : column.num ? "num" : "" }, shown(value));
      }));
    }));
  };
  const more = el("button", { type: "button", className: "more", onclick: () => {
    state.all = true;
    update(false);
    tableBox.tBodies[0].rows[FIRST_ROWS].querySelector("input").focus();  // this button is gone
  } });
  /** Filter and sort anew; the head with its inputs is kept while somebody types there. */
  const update = (withHead = true) => {
    visible = filtered();
    if (withHead || !tableBox.tHead) tableBox.replaceChildren(head(), body());
    else tableBox.tBodies[0].replaceWith(body());
    count.textContent = `${visible.length} of ${runs.length} runs`;
    more.hidden = state.all || visible.length <= FIRST_ROWS;
    more.textContent = `Show all ${visible.length} rows`;
    onPaper.textContent = [count.textContent, more.hidden ? "" : `the table has the first ${FIRST_ROWS}`, state.search && `search: ${state.search}`,
      ...Object.entries(state.filters).filter(([, filter]) => filter.trim()).map(([name, filter]) => `${name}: ${filter}`)].filter(Boolean).join("; ");
    redraw();
    legend();
    keep();
  };
  const runsSection = () => section("runs", "Runs",
    el("div", { className: "bar" },
      el("label", {}, "Search", el("input", { type: "search", id: "search", value: state.search, oninput: (event) => { state.search = event.target.value; update(false); } })),
      count,
      el("button", { type: "button", id: "clear", onclick: () => {
        state.filters = {}; state.search = ""; byId("search").value = ""; state.off.clear(); update();
      } }, "Clear filters")),
    el("details", { className: "noprint", id: "columns" }, el("summary", {}, "Columns, and how to filter"),
      el("p", { className: "soft" }, "A filter is a part of the text, or >1e-3, >=1 <5, 1..5, =x, =x|y, !=x. A title sorts, the best first. Charts below show the rows that fit, in this order."),
      el("div", {}, ...columns.map((column) => check(column.name, state.columns.has(column.name), (isOn) => {
        if (isOn) state.columns.add(column.name); else state.columns.delete(column.name);
        update();
      })))),
    onPaper, el("div", { className: "wide runs" }, tableBox), more);

  // --- curves ---

  const curve = (name, index) => {
    const place = (data.curves[name] || {})[index];
    if (!place) return null;
    const [steps, values, size] = place;
    return { x: whole.subarray(steps, steps + size), y: floats.subarray(values, values + size) };
  };
  const smoothed = (values) => {
    if (!state.smooth) return values;
    const out = new Float32Array(values.length);
    let sum = 0, weight = 0;
    for (let i = 0; i < values.length; i += 1) {
      sum = sum * state.smooth + values[i] * (1 - state.smooth);
      weight = weight * state.smooth + 1 - state.smooth;
      out[i] = sum / weight;
    }
    return out;
  };
  const at = (line, x) => {
    let low = 0, high = line.x.length - 1;
    if (x < line.x[low] || x > line.x[high]) return NaN;
    while (high - low > 1) { const middle = (low + high) >> 1; if (line.x[middle] <= x) low = middle; else high = middle; }
    if (line.x[high] === line.x[low] || line.x[low] === x) return line.y[low];
    return line.y[low] + ((line.y[high] - line.y[low]) * (x - line.x[low])) / (line.x[high] - line.x[low]);
  };
  const groups = (indices) => {
    const kept = data.axes.filter((axis) => axis !== state.band);
    const found = new Map();
    for (const index of indices) {
      const key = JSON.stringify([runs[index].sweep, ...kept.map((axis) => runs[index].cells[axis])]);
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(index);
    }
    return [...found.values()].map((members) => ({
      members, name: kept.map((axis) => `${axis.split(".").pop()}=${shown(runs[members[0]].cells[axis])}`).join(" ") || "all",
    }));
  };
  const lineOf = (index, x, y, name, extra = {}) => ({
    type: "scatter", mode: x.length > 12 ? "lines" : "lines+markers", x, y, name: esc(name), text: esc(name), meta: { run: index },
    line: { color: colour(index), width: 1.6 }, marker: { color: colour(index), size: 4 },
    hovertemplate: "%{text}<br>%{x}: %{y:.5g}<extra></extra>", ...extra,
  });
  const bandTraces = (name) => groups(drawn()).flatMap(({ members, name: groupName }) => {
    const lines = members.map((index) => curve(name, index)).filter(Boolean);
    if (!lines.length) return [];
    const x = lines.reduce((longest, line) => (line.x.length > longest.x.length ? line : longest)).x;
    const low = [], high = [], mean = [], xs = [];
    for (const step of x) {
      const values = lines.map((line) => at(line, step)).filter(Number.isFinite);
      if (!values.length) continue;
      xs.push(step); low.push(Math.min(...values)); high.push(Math.max(...values));
      mean.push(values.reduce((sum, value) => sum + value, 0) / values.length);
    }
    const tint = `${colour(members[0])}33`;
    return [
      { type: "scatter", x: xs, y: smoothed(low), mode: "lines", line: { width: 0, color: tint }, hoverinfo: "skip" },
      { type: "scatter", x: xs, y: smoothed(high), mode: "lines", line: { width: 0, color: tint }, fill: "tonexty", fillcolor: tint, hoverinfo: "skip" },
      lineOf(members[0], xs, smoothed(mean), `${groupName} (mean of ${lines.length})`),
    ];
  });
  const curveChart = (name) => () => {
    const few = drawn().length <= 20;
    const traces = state.band ? bandTraces(name) : drawn().flatMap((index) => {
      const line = curve(name, index);
      if (!line) return [];
      const x = Array.from(line.x);
      const faint = state.smooth && few ? [lineOf(index, x, Array.from(line.y), labels[index], { opacity: 0.25, hoverinfo: "skip", hovertemplate: undefined })] : [];
      return [...faint, lineOf(index, x, Array.from(smoothed(line.y)), labels[index])];
    });
    return { traces, layout: {
      xaxis: { title: { text: "step" }, type: state.logX ? "log" : "linear" }, yaxis: { type: state.logY ? "log" : "linear" },
    } };
  };
  const legendBox = el("ul", { className: "legend" });
  const legend = () => {
    const items = state.band ? groups(drawn()).map(({ members, name }) => [members[0], name]) : drawn().map((index) => [index, labels[index]]);
    legendBox.replaceChildren(...items.slice(0, 30).map(([index, name]) => el("li", {}, swatch(index), name)),
      ...(items.length > 30 ? [el("li", {}, `and ${items.length - 30} more`)] : []));
  };
  const set = (key, value) => { state[key] = value; redraw(); legend(); keep(); };
  const curvesSection = () => section("curves", "Curves",
    el("div", { className: "bar" },
      select("Runs", MOST.map((most) => [most, most === MOST.at(-1) ? "all" : `first ${most}`]), String(state.most), (value) => set("most", Number(value))),
      // A browser allows few changes of the address a second: it is changed where the slider is let go.
      el("label", {}, "Smoothing", el("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, value: state.smooth, onchange: keep, oninput: (event) => { state.smooth = Number(event.target.value); redraw(); } })),
      check("log x", state.logX, (isOn) => set("logX", isOn)),
      check("log y", state.logY, (isOn) => set("logY", isOn)),
      data.axes.length ? select("Band over", [["", "nothing"], ...data.axes.map((axis) => [axis, axis])], state.band, (value) => set("band", value)) : null),
    legendBox, el("p", {}), el("div", { className: "plots" }, ...curveNames.map((name) => figure(name, curveChart(name)))));

  // --- parameters ---

  const values = (name, indices) => indices.map((index) => runs[index].cells[name]);
  /** Return positions of a column's values on a chart's axis, with ticks for values that are no numbers. */
  const scaleOf = (name, indices) => {
    const cells = values(name, indices);
    const known = cells.filter((cell) => cell !== null && cell !== undefined);
    if (known.every(isNumber)) {
      const low = Math.min(...known), high = Math.max(...known);
      return { at: cells, isLog: low > 0 && high / low >= 10, low, high, ticks: null, known: [...new Set(known)].sort((a, b) => a - b) };
    }
    const names = [...new Set(known.map(shown))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    return { at: cells.map((cell) => (cell === null || cell === undefined ? null : names.indexOf(shown(cell)))), isLog: false, low: 0, high: Math.max(1, names.length - 1), ticks: names };
  };
  /** Return the place of a value between the smallest (0) and the largest one (1) of its axis. */
  const shareOf = (scale, value) => {
    if (!isNumber(value)) return null;
    if (scale.high === scale.low) return 0.5;
    return scale.isLog ? Math.log(value / scale.low) / Math.log(scale.high / scale.low) : (value - scale.low) / (scale.high - scale.low);
  };
  /** Return the ticks of a chart's axis: at the values themselves, unless they are many or close together. */
  const ticksOf = (scale) => {
    if (scale.ticks) return { tickvals: scale.ticks.map((_, i) => i), ticktext: scale.ticks.map(esc) };
    const type = scale.isLog ? "log" : "linear", shares = scale.known.map((value) => shareOf(scale, value));
    if (shares.length > 8 || shares.some((share, i) => i > 0 && share - shares[i - 1] < 0.1)) return { type };
    return { type, tickvals: scale.known, ticktext: scale.known.map(shown) };
  };
  const withMetric = () => visible.filter((index) => !state.off.has(index) && isNumber(runs[index].cells[state.metric]));
  const slice = (axis) => () => {
    const indices = withMetric(), scale = scaleOf(axis, indices);
    return { traces: indices.length ? [{
      type: "scatter", mode: "markers", x: scale.at, y: values(state.metric, indices), customdata: indices, text: indices.map((index) => esc(labels[index])),
      marker: { color: indices.map(colour), size: 8, opacity: 0.85 }, hovertemplate: "%{text}<br>%{y:.5g}<extra></extra>",
    }] : [], layout: { xaxis: { title: { text: esc(axis) }, ...ticksOf(scale) }, yaxis: { title: { text: esc(state.metric) } } } };
  };
  const parallel = () => {
    const indices = withMetric().slice(0, 500);
    const names = [...data.axes, state.metric];
    const scales = names.map((name) => scaleOf(name, indices));
    const traces = indices.map((index, i) => ({
      type: "scatter", mode: "lines", x: names.map((_, at) => at), y: scales.map((scale) => shareOf(scale, scale.at[i])), meta: { run: index },
      line: { color: colour(index), width: 1.4 }, opacity: indices.length > 60 ? 0.55 : 0.9, text: esc(`${labels[index]}: ${shown(runs[index].cells[state.metric])}`),
      hovertemplate: "%{text}<extra></extra>",
    }));
    const annotations = scales.flatMap((scale, at) => {
      const ticks = scale.ticks ? scale.ticks.slice(0, 12).map((text, i) => [shareOf(scale, i), text]) : scale.low === scale.high ? [[0.5, shown(scale.low)]] : [[0, shown(scale.low)], [1, shown(scale.high)]];
      return ticks.map(([y, text]) => ({ x: at, y, text: esc(text), showarrow: false, xanchor: "left", xshift: 4, font: { size: 11, color: css("--ink") }, bgcolor: css("--card"), opacity: 0.85 }));
    });
    const lines = names.map((_, at) => ({ type: "line", x0: at, x1: at, y0: 0, y1: 1, line: { color: css("--soft"), width: 1 } }));
    return { traces, layout: { annotations, shapes: lines, dragmode: "select", selectdirection: "d",
      xaxis: { tickvals: names.map((_, at) => at), ticktext: names.map(esc), showgrid: false, zeroline: false, range: [-0.15, names.length - 0.6] },
      yaxis: { visible: false, range: [-0.06, 1.06] } } };
  };
  /** Filter the table by the part of an axis of the parallel coordinates that was dragged over. */
  const brush = ({ x, y }) => {
    const names = [...data.axes, state.metric];
    const name = names[Math.max(0, Math.min(names.length - 1, Math.round((x[0] + x[1]) / 2)))];
    const scale = scaleOf(name, withMetric().slice(0, 500));
    const [bottom, top] = [Math.min(...y), Math.max(...y)];
    if (!scale.ticks && scale.high === scale.low) return;
    const value = (share) => (share <= 0 ? scale.low : share >= 1 ? scale.high
      : Number((scale.isLog ? scale.low * (scale.high / scale.low) ** share : scale.low + share * (scale.high - scale.low)).toPrecision(6)));
    const within = (scale.ticks || []).filter((_, at) => shareOf(scale, at) >= bottom && shareOf(scale, at) <= top);
    if (scale.ticks ? !within.length : top <= 0 || bottom >= 1) return;
    state.filters[name] = scale.ticks ? `=${within.join("|")}` : `${value(bottom)}..${value(top)}`;
    state.columns.add(name);
    for (const label of byId("columns").querySelectorAll("label")) if (label.textContent === name) label.firstChild.checked = true;
    update();
  };
  const importance = () => {
    const found = (data.importance || {})[state.metric];
    if (!found) return null;
    const order = [...found].reverse();
    return { traces: [{ type: "bar", orientation: "h", y: order.map((one) => esc(one.axis)), x: order.map((one) => one.share),
      error_x: { type: "data", array: order.map((one) => one.std), color: css("--soft"), thickness: 1 }, marker: { color: css("--c0") },
      hovertemplate: "%{y}: %{x:.2f}<extra></extra>" }], layout: { xaxis: { title: { text: "share of the forest's decisions" }, rangemode: "tozero" } } };
  };
  // Two axes: each run where its values are, over a mean of the runs that is weighted by their distance.
  const CELLS_A_SIDE = 40;
  const varied = data.axes.filter((axis) => new Set(runs.map((run) => shown(run.cells[axis]))).size > 1);
  const ranked = ((data.importance || {})[usual.metric] || []).map((one) => one.axis).filter((axis) => varied.includes(axis));
  usual.pair = [...new Set([...ranked, ...varied])].slice(0, 2);
  if (state.pair.length !== 2 || !state.pair.every((axis) => varied.includes(axis))) state.pair = [...usual.pair];
  const twoAxes = () => {
    const indices = withMetric().slice(0, 500);
    const scales = state.pair.map((axis) => scaleOf(axis, indices));
    const known = indices.map((index, i) => ({ index, at: scales.map((scale) => scale.at[i]), share: scales.map((scale) => shareOf(scale, scale.at[i])), value: runs[index].cells[state.metric] }))
      .filter((one) => one.share.every(isNumber));
    if (!known.length) return null;
    const side = scales.map((scale) => Array.from({ length: CELLS_A_SIDE }, (_, i) => {
      const share = i / (CELLS_A_SIDE - 1);
      return scale.isLog ? scale.low * (scale.high / scale.low) ** share : scale.low + share * (scale.high - scale.low);
    }));
    const mean = (x, y) => {
      let sum = 0, total = 0;
      for (const one of known) {
        const weight = 1 / (((one.share[0] - x) ** 2 + (one.share[1] - y) ** 2) ** 2 + 1e-6);
        sum += weight * one.value;
        total += weight;
      }
      return sum / total;
    };
    const z = side[1].map((_, j) => side[0].map((__, i) => mean(i / (CELLS_A_SIDE - 1), j / (CELLS_A_SIDE - 1))));
    const axis = (scale, name) => ({ title: { text: esc(name) }, ...ticksOf(scale) });
    const values = known.map((one) => one.value);
    return { traces: [
      ...(known.length > 3 && scales.every((scale) => scale.high > scale.low) ? [{ type: "contour", x: side[0], y: side[1], z, colorscale: "Greys", reversescale: theme === "dark", opacity: 0.55, hoverinfo: "skip",
        zmin: Math.min(...values), zmax: Math.max(...values), ncontours: 12, line: { width: 0.5 }, colorbar: { thickness: 10, title: { text: esc(state.metric), side: "right" } } }] : []),
      { type: "scatter", mode: "markers", x: known.map((one) => one.at[0]), y: known.map((one) => one.at[1]), customdata: known.map((one) => one.index),
        text: known.map((one) => `${esc(labels[one.index])}<br>${esc(state.metric)} ${shown(one.value)}`), hovertemplate: "%{text}<extra></extra>",
        marker: { color: known.map((one) => colour(one.index)), size: 9, line: { width: 1, color: css("--card") } } },
    ], layout: { xaxis: axis(scales[0], state.pair[0]), yaxis: axis(scales[1], state.pair[1]) } };
  };
  const twoAxesFigure = () => {
    if (varied.length < 2) return null;
    const choice = (at, title) => select(title, varied.map((name) => [name, name]), state.pair[at], (value) => { state.pair[at] = value; redraw(); keep(); });
    const made = figure("Two axes", twoAxes, { note: "Between the runs: a mean of their values weighted by distance, no measurement." });
    made.querySelector("h3").after(el("div", { className: "bar", id: "pair" }, choice(0, "Across"), choice(1, "Upward")));
    return made;
  };
  const parametersSection = () => (data.axes.length && metricNames.length ? section("parameters", "Parameters",
    el("div", { className: "bar" }, select("Metric", metricNames.map((name) => [name, name]), state.metric, (value) => set("metric", value))),
    el("div", { className: "plots one" }, figure("Parallel coordinates", parallel, { high: true, brushed: brush, note: "Drag over a part of an axis to filter the rows by it." })), el("p", {}),
    el("div", { className: "plots" },
      Object.keys(data.importance || {}).length ? figure("Importance", importance, { note: data.importance_note }) : null,
      twoAxesFigure(),
      ...data.axes.map((axis) => figure(`Slice: ${axis}`, slice(axis))))) : null);

  // --- charts of the whole sweep by domains ---

  const panelChart = (panel) => () => {
    if (panel.bars.length) {
      return { traces: panel.bars.map((bars) => ({ type: "bar", name: esc(bars.name), x: panel.categories.map(esc), y: bars.heights,
        marker: { color: css(`--${bars.tone}`) }, hovertemplate: "%{x}: %{y} %{fullData.name}<extra></extra>" })),
      layout: { barmode: "stack", showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, margin: { l: 50, r: 14, t: 56, b: 40 },
        xaxis: { type: "category" }, yaxis: { title: { text: esc(panel.y) }, rangemode: "tozero" } } };
    }
    const isOn = new Set(visible.filter((index) => !state.off.has(index)));
    const traces = panel.dots.flatMap((dots) => {
      const kept = dots.points.map((point, i) => [point, dots.runs[i]]).filter(([, run]) => isOn.has(run));
      return kept.length ? [{ type: "scatter", mode: "markers", name: esc(dots.name), x: kept.map(([point]) => point[0]), y: kept.map(([point]) => point[1]), customdata: kept.map(([, run]) => run),
        text: kept.map(([, run]) => `${esc(labels[run])} (${esc(dots.name)})`), hovertemplate: "%{text}<br>%{x}: %{y:.5g}<extra></extra>",
        marker: { color: kept.map(([, run]) => colour(run)), size: 8, opacity: dots.faint ? 0.6 : 0.95, symbol: dots.faint ? "circle-open" : "circle" } }] : [];
    });
    if (panel.line) {
      traces.push({ type: "scatter", mode: "lines", name: esc(panel.line[0]), x: panel.line[1].map(([x]) => x), y: panel.line[1].map(([, y]) => y),
        line: { color: css("--ink"), width: 1.6 }, hovertemplate: `${esc(panel.line[0])}: %{y:.5g}<extra></extra>` });
    }
    return { traces, layout: { showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, margin: { l: 50, r: 14, t: 56, b: 40 },
      xaxis: { title: { text: esc(panel.x) } }, yaxis: { title: { text: esc(panel.y) } } } };
  };
  const panelSections = () => [...new Set(data.panels.map((panel) => panel.section))].map((name) => section(`of-${name.toLowerCase()}`, name,
    el("div", { className: "plots" }, ...data.panels.filter((panel) => panel.section === name)
      .map((panel) => figure(data.sweeps.length > 1 ? `${panel.title}: ${panel.sweep}` : panel.title, panelChart(panel), { note: panel.note })))));

  // --- failures ---

  const failuresSection = () => (data.failures.length ? section("failures", "Failures",
    ...data.failures.map((group) => el("div", { className: "group" },
      el("b", { className: "bad" }, `${group.runs.length} × ${group.state}: `), group.verdict,
      el("ul", {}, ...group.because.map((line) => el("li", {}, line))),
      group.advice.length ? el("div", { className: "soft" }, "Do: ", el("ul", {}, ...group.advice.map((line) => el("li", {}, line)))) : null,
      el("div", {}, ...group.runs.slice(0, 20).map((index) => el("span", { className: "chip" }, swatch(index), labels[index])),
        group.runs.length > 20 ? `and ${group.runs.length - 20} more` : ""))),
    data.nodes.length ? table(["Node", "Runs that failed there", "Causes"], data.nodes.map((node) => [node.name, String(node.count), node.causes])) : null) : null);

  // --- costs ---

  const byLedger = () => visible.filter((index) => runs[index].ledger && runs[index].ledger.elapsed_s > 0).slice(0, 40);
  const unitOf = (hours) => { // the unit in which the largest of these times is at least 1
    const most = Math.max(0, ...hours);
    return most >= 1 ? { name: "hours", short: "h", per: 1 }
      : most * 60 >= 1 ? { name: "minutes", short: "min", per: 60 } : { name: "seconds", short: "s", per: 3600 };
  };
  const ledgerChart = () => {
    const indices = byLedger().reverse();
    if (!indices.length) return null;
    const unit = unitOf(indices.map((index) => runs[index].ledger.elapsed_s / 3600));
    return { height: Math.max(420, 18 * indices.length + 110), traces: data.kinds.filter((kind) => indices.some((index) => runs[index].ledger.seconds[kind.name])).map((kind) => ({
      type: "bar", orientation: "h", name: kind.words, y: indices.map((_, at) => at), x: indices.map((index) => (runs[index].ledger.seconds[kind.name] || 0) / 3600 * unit.per),
      marker: { color: theme === "dark" ? kind.dark : kind.light }, customdata: indices, text: indices.map((index) => `${esc(labels[index])}<br>${kind.words}`),
      textposition: "none", hovertemplate: `%{text}: %{x:.3g} ${unit.short}<extra></extra>`,
    })), layout: { barmode: "stack", showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" }, margin: { l: 50, r: 14, t: 56, b: 40 },
      xaxis: { title: { text: unit.name } }, yaxis: { tickvals: indices.map((_, at) => at), ticktext: indices.map((index) => esc(labels[index].slice(0, 60))) } } };
  };
  const hoursChart = () => {
    const name = total("gpu_hours") > 0 ? "gpu_hours" : "core_hours";
    const sums = new Map();
    for (const index of visible) sums.set(runs[index].cells.state, (sums.get(runs[index].cells.state) || 0) + (runs[index].cells[name] || 0));
    const states = [...sums.keys()].sort(), unit = unitOf([...sums.values()]);
    return { traces: [{ type: "bar", x: states, y: states.map((one) => sums.get(one) * unit.per), hovertemplate: "%{x}: %{y:.4g}<extra></extra>",
      marker: { color: states.map((one) => css(tone(one) ? `--${tone(one)}` : "--c0")) } }],
    layout: { yaxis: { title: { text: `${name === "gpu_hours" ? "GPU" : "core"}-${unit.name}` }, rangemode: "tozero" } } };
  };
  const costsSection = () => section("costs", "Time and cost",
    el("div", { className: "plots" }, figure("Time by state", hoursChart)), el("p", {}),
    runs.some((run) => run.ledger && run.ledger.elapsed_s > 0) ? el("div", { className: "plots one" },
      figure("Where the time went", ledgerChart, { high: true, note: "Each second that a run had its nodes, all attempts together; the first 40 rows of the table." })) : null);

  // --- scaling ---

  const scalingChart = (study, key, isLog) => () => {
    const ranks = study.points.map((point) => point.ranks);
    const ideal = isLog ? ranks.map((count) => count / ranks[0]) : ranks.map(() => 1);
    return { traces: [
      { type: "scatter", mode: "lines", x: ranks, y: ideal, line: { dash: "dash", color: css("--soft") }, hovertemplate: "ideal<extra></extra>" },
      { type: "scatter", mode: "lines+markers", x: ranks, y: study.points.map((point) => point[key]), line: { color: css("--soft"), width: 1 },
        customdata: study.points.map((point) => point.run), marker: { size: 10, color: study.points.map((point) => colour(point.run)) },
        text: study.points.map((point) => esc(labels[point.run])), hovertemplate: "%{text}<br>%{x} ranks: %{y:.3g}<extra></extra>" },
    ], layout: { xaxis: { type: "log", title: { text: "ranks" }, tickvals: ranks }, yaxis: isLog ? { type: "log", title: { text: key } } : { rangemode: "tozero", title: { text: key }, tickformat: ".0%" } } };
  };
  const scalingSection = () => (data.scaling.length ? section("scaling", "Scaling", ...data.scaling.map((study) => el("div", {},
    el("h3", {}, study.title), el("div", { className: "plots" }, figure("Speed-up", scalingChart(study, "speedup", true)), figure("Parallel efficiency", scalingChart(study, "efficiency", false))),
    el("p", {}), table(["Hardware", "Ranks", "Global batch", `Throughput, ${study.unit}`, "Speed-up", "Efficiency", "Data wait"], study.points.map((point) => [
      point.hardware, shown(point.ranks), shown(point.global_batch_size), shown(point.throughput), shown(point.speedup), `${(100 * point.efficiency).toFixed(1)}%`,
      point.data_wait_share === null ? "-" : `${(100 * point.data_wait_share).toFixed(1)}%`]))))) : null);

  // --- one run: telemetry, command line, revision, configuration ---

  const runBox = el("div");
  const series = (chart) => () => ({
    traces: chart.lines.map((line, at) => ({
      type: "scatter", mode: line.n > 12 ? "lines" : "lines+markers", marker: { size: 4 }, name: esc(line.name), text: esc(line.name), x: Array.from(floats.subarray(line.x, line.x + line.n)), y: Array.from(floats.subarray(line.y, line.y + line.n)),
      line: { color: css(`--c${at % 8}`), width: 1.4 }, hovertemplate: "%{text}<br>%{x:.1f} min: %{y:.4g}<extra></extra>",
    })),
    layout: { xaxis: { title: { text: "minutes" }, rangemode: "tozero" }, yaxis: { title: { text: esc(chart.unit) }, rangemode: "tozero", ...(chart.is_share ? { tickformat: ".0%" } : {}) } },
  });
  const showRun = () => {
    forget(runBox);
    const run = runs[state.run], sweep = data.sweeps[run.sweep];
    const config = { ...sweep.config, ...run.config };
    for (const key of run.lacks || []) delete config[key];
    const rows = el("tbody");
    const fill = (search) => rows.replaceChildren(...Object.entries(config).filter(([key, value]) => `${key}=${shown(value)}`.includes(search))
      .map(([key, value]) => el("tr", {}, el("td", {}, el("code", {}, key)), el("td", {}, key in run.config ? el("b", {}, shown(value)) : shown(value)))));
    fill("");
    const facts = [["State", `${run.cells.state}${run.cause ? `: ${run.cause}` : ""}`], ["Nodes", run.node || "-"], ["Revision", sweep.revision || "-"], ["Code", run.code || "-"], ["Overrides", run.overrides || "-"]];
    runBox.append(
      el("p", {}, swatch(state.run), el("b", {}, run.id)),
      el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      el("h3", {}, "Command line"), el("pre", {}, run.command || sweep.command || "not known"),
      ...(run.lines.length ? [el("h3", {}, "Last lines"), el("pre", {}, run.lines.join("\n"))] : []),
      el("h3", {}, "GPUs and hosts"),
      run.series.length ? el("div", { className: "plots" }, ...run.series.map((chart) => figure(chart.title, series(chart))))
        : el("p", { className: "soft" }, "No samples (monitor.sample_s)."),
      el("details", { id: "config" }, el("summary", {}, "Configuration (bold: other than the first run's)"),
        el("div", {}, el("label", {}, "Search ", el("input", { type: "search", oninput: (event) => fill(event.target.value) }))),
        el("div", { className: "wide" }, el("table", { className: "config" }, rows))));
  };
  const chooseRun = (index) => { state.run = index; byId("chosen-run").value = String(index); showRun(); keep(); };
  const runSection = () => {
    const box = el("select", { id: "chosen-run", onchange: (event) => chooseRun(Number(event.target.value)) }, ...runs.map((run, index) => option(String(index), `${data.sweeps.length > 1 ? `${data.sweeps[run.sweep].name}/` : ""}${run.id}`, index === state.run)));
    box.style.maxWidth = "100%";
    return section("run", "One run", el("div", { className: "bar" }, el("label", {}, "Run", box)), runBox);
  };

  // --- page ---

  const useTheme = (name) => {
    theme = name;
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "Light" : "Dark";
  };
  const recolour = () => {
    for (const box of document.querySelectorAll(".swatch")) box.style.background = colour(Number(box.dataset.run));
    redraw();
  };
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const app = byId("app");
  app.replaceChildren(
    el("a", { className: "skip", href: "#runs" }, "To the table of runs"),
    el("h1", {}, data.sweeps.map((sweep) => sweep.name).join(" and ")),
    el("div", { className: "bar" }, el("span", { className: "soft" }, data.made),
      el("button", { type: "button", id: "theme", onclick: () => { isChosen = true; useTheme(theme === "dark" ? "light" : "dark"); recolour(); } }),
      el("button", { type: "button", onclick: () => window.print() }, "Print")));
  useTheme(prefersDark.matches ? "dark" : "light");
  prefersDark.addEventListener("change", (event) => { if (!isChosen) { useTheme(event.matches ? "dark" : "light"); recolour(); } });
  const sections = [runsSection(), ...panelSections(), curveNames.length ? curvesSection() : null, parametersSection(), failuresSection(), costsSection(), scalingSection(), runs.length ? runSection() : null].filter(Boolean);
  const nav = el("nav", { "aria-label": "sections" }, ...sections.map((one) => el("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)));
  app.append(nav, summary(), ...sections);
  update();
  if (runs.length) showRun();
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/INPUT|SELECT/.test(event.target.tagName)) { event.preventDefault(); byId("search").focus(); }
  });
  window.addEventListener("hashchange", () => {
    if (!location.hash.includes("=")) { keep(); return; }  // a link to a section of this page
    location.reload();
  });
  let before = null;
  window.addEventListener("beforeprint", () => { before = theme; isPaper = true; useTheme("light"); recolour(); redraw(true); });
  window.addEventListener("afterprint", () => { isPaper = false; if (before) { useTheme(before); recolour(); } });
  document.documentElement.dataset.table = String(Math.round(performance.now()));
  // The browser first shows the table; then the chart library, three quarters of the page, is unpacked.
  await new Promise((resolve) => { requestAnimationFrame(() => setTimeout(resolve, 0)); });
  const script = el("script");
  script.textContent = await bytesOf("plotly").text();
  document.head.append(script);
  plotly = window.Plotly;
  for (const panel of panels) if (panel.isNear) drawPanel(panel);
  document.documentElement.dataset.shown = String(Math.round(performance.now()));
  document.documentElement.dataset.script = String(Math.round(performance.now() - started));
})();
