// Charts of the console: series of the last hour, which grow with the page's stream, and the histogram of due times.
(() => {
  "use strict";
  const COLOURS = ["#5b6cf0", "#1d9a5b", "#d97b16", "#c23a45"], OTHERS = "#97a0b3";
  const HOUR = 3600;
  // Interval of samples in seconds, unless the node samples more rarely.
  const SAMPLE = 10;
  const RANGES = { minute: 60, hour: HOUR, day: 24 * HOUR, week: 7 * 24 * HOUR, month: 30 * 24 * HOUR, year: 365 * 24 * HOUR };
  // Shortest and longest range of due times that the buttons and a drag reach, in ms.
  const LEAST = 60000, MOST = 20 * 365 * 24 * HOUR * 1000;
  const home = document.querySelector("[data-charts]");
  if (!home || !window.uPlot) return;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ZONE = document.documentElement.dataset.zone || "UTC";
  const zoned = (seconds) => uPlot.tzDate(new Date(seconds * 1000), ZONE);
  const writer = (of) => new Intl.DateTimeFormat("en-GB", { timeZone: ZONE, hourCycle: "h23", ...of });
  const TIME = writer({ hour: "2-digit", minute: "2-digit" }), SECONDS = writer({ timeStyle: "medium" }), DAY = writer({ day: "numeric", month: "short" }), MONTH = writer({ month: "short", year: "numeric" }), FULL = writer({ weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const on = (written, seconds) => written.format(new Date(seconds * 1000));

  // Units of lateness: name, milliseconds, and up to which value.
  const SPANS = [["ms", 1, 1000], ["s", 1000, 60000], ["min", 60000, 3600000], ["h", 3600000, 172800000], ["d", 86400000, Infinity]];

  function number(value) {
    return value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 1 ? 2 : Math.abs(value) < 100 ? 1 : 0 });
  }

  function written(value, unit) {
    if (value === null || value === undefined) return "–";
    if (unit === "ms") {
      const [name, size] = SPANS.find(([, , end]) => value < end);
      return `${number(value / size)} ${name}`;
    }
    return (Math.abs(value) >= 1e6 ? `${(value / 1e6).toPrecision(3)} M` : number(value)) + (unit ? " " + unit : "");
  }

  // Times of the day in 24 hours; dates where the marks are days apart, and at midnight.
  function times(_, ticks, axis, space, step) {
    return ticks.map((tick) => {
      if (step >= 28 * 86400) return on(MONTH, tick);
      if (step >= 86400 || on(SECONDS, tick) === "00:00:00") return on(DAY, tick);
      return on(step < 60 ? SECONDS : TIME, tick);
    });
  }

  // Steps of an axis of whole things, such as messages: half a message is no mark.
  const WHOLE = [1, 2, 5].flatMap((first) => [...Array(13).keys()].map((power) => first * 10 ** power)).sort((a, b) => a - b);
  // Steps of an axis of lateness: 1, 2 or 5 of its unit, and the usual parts of minutes, hours and days.
  const LATE = [...WHOLE.filter((one) => one <= 500), ...[1, 2, 5, 10, 20, 30].flatMap((one) => [one * 1000, one * 60000]), ...[1, 2, 5, 10].map((one) => one * 3600000), ...WHOLE.slice(0, 12).map((one) => one * 86400000)].sort((a, b) => a - b);

  function axes(unit) {
    const ink = css("--muted"), line = css("--line"), font = "12px system-ui, sans-serif";
    return [
      { stroke: ink, grid: { show: false }, ticks: { stroke: line, width: 1, size: 4 }, font, space: 64, size: 34, values: times },
      { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { show: false }, font, size: 62, ...(unit === "ms" ? { incrs: LATE } : unit ? {} : { incrs: WHOLE }), values: (_, ticks) => ticks.map((v) => written(v, unit)) },
    ];
  }

  function legend(place, names) {
    const list = document.createElement("ul");
    list.className = "legend";
    names.forEach((name, n) => {
      const item = document.createElement("li"), swatch = document.createElement("span"), value = document.createElement("b");
      swatch.className = `swatch s${n}`;
      item.append(swatch, name + " ", value);
      list.append(item);
    });
    list.append(Object.assign(document.createElement("li"), { className: "cursor" }));
    place.after(list);
    return [...list.querySelectorAll("b")];
  }

  class Lines {
    constructor(place) {
      this.place = place;
      this.name = place.dataset.chart;
      this.unit = place.dataset.unit;
      this.names = place.dataset.names.split(",");
      this.values = legend(place, this.names);
      this.data = [[], ...this.names.map(() => [])];
      this.empty = document.createElement("p");
      this.empty.className = "empty";
      place.append(this.empty);
      this.say("The chart begins in some seconds.");
    }
    options() {
      return {
        width: this.place.clientWidth, height: this.place.clientHeight, tzDate: zoned, legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
        scales: { x: { time: true, range: (_, low, high) => [Math.min(low, high - HOUR / 6), high] }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
        axes: axes(this.unit),
        series: [{}, ...this.names.map((_, n) => ({ stroke: COLOURS[n], width: 2, dash: this.names[n] === "max" ? [4, 4] : undefined, points: { show: false }, fill: this.names.length < 3 && n === 0 ? COLOURS[n] + "1c" : undefined, spanGaps: false }))],
        hooks: { setCursor: [(chart) => this.tell(chart.cursor.idx)] },
      };
    }
    draw() {
      if (this.chart) this.chart.destroy();
      this.chart = null;
      this.empty.hidden = this.data[0].length > 0;
      if (!this.empty.hidden) return;
      this.chart = new uPlot(this.options(), this.data, this.place);
      this.tell(null);
    }
    tell(at) {
      const n = at === null || at === undefined ? this.data[0].length - 1 : at;
      this.values.forEach((value, k) => { value.textContent = written(this.data[k + 1][n], this.unit); });
      const chosen = at !== null && at !== undefined;
      this.place.nextElementSibling.lastElementChild.textContent = chosen ? on(FULL, this.data[0][n]) : "";
    }
    say(words) { this.empty.textContent = words; }
    set(series) { this.data = [[...series.at], ...series[this.name]]; this.trim(); this.draw(); }
    // Whether samples are missing between the newest point and this one: the page was hidden, for example.
    misses(point) {
      const [last, before = last - SAMPLE] = this.data[0].slice(-2).reverse();
      return point.at - last > 2.5 * Math.min(Math.max(SAMPLE, last - before), HOUR / 6);
    }
    trim() {
      const at = this.data[0], old = at.findIndex((one) => one > at[at.length - 1] - HOUR);
      if (old > 0) for (const row of this.data) row.splice(0, old);
    }
    add(point) {
      const at = this.data[0];
      if (at.length && point.at <= at[at.length - 1]) return;
      [point.at, ...point[this.name]].forEach((value, k) => this.data[k].push(value));
      this.trim();
      if (this.chart) { this.chart.setData(this.data); this.tell(null); } else this.draw();
    }
  }

  class Due {
    constructor(place) {
      this.place = place;
      this.says = document.getElementById("due-says");
      this.trail = [];
      this.buttons = [...document.querySelectorAll("[data-range]")];
      for (const button of this.buttons) button.addEventListener("click", () => this.choose(button.dataset.range));
      for (const button of document.querySelectorAll("[data-move]")) button.addEventListener("click", () => this.move(button.dataset.move));
      this.list = document.getElementById("due-list");
      this.legend = document.createElement("ul");
      this.legend.className = "legend";
      if (!place.dataset.due.includes("topic=")) place.after(this.legend);
      // A click opens the messages of a bar; a drag, which ends in a click, too, does not.
      place.addEventListener("pointerdown", (event) => { this.pressed = event.clientX; });
      place.addEventListener("click", (event) => { if (Math.abs(event.clientX - this.pressed) < 4) this.open(); });
      place.addEventListener("keydown", (event) => this.key(event));
      this.choose("day");
    }
    // Address of the list of messages that fall due in a time, in seconds.
    address(from, to, topic) {
      const url = new URL(this.list.href);
      const at = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 19) + "Z";
      url.searchParams.set("from", at(from));
      url.searchParams.set("to", at(to));
      if (topic) url.searchParams.set("topic", topic);
      return url;
    }
    open() {
      const n = this.chart && this.chart.cursor.idx;
      if (n !== null && n !== undefined && this.found.count[n]) location.assign(this.address(this.found.at[n], this.found.at[n] + this.found.step));
    }
    key(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Enter") this.open();
      if (!step || !this.chart) return;
      event.preventDefault();
      const { at } = this.found, now = this.chart.cursor.idx;
      const n = Math.min(Math.max((now === null || now === undefined ? (step > 0 ? -1 : at.length) : now) + step, 0), at.length - 1);
      this.chart.setCursor({ left: this.chart.valToPos(at[n], "x") + 1, top: 1 });
    }
    choose(range) {
      const now = Date.now();
      this.trail = [];
      for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.dataset.range === range));
      this.load(now, now + RANGES[range] * 1000);
    }
    // By half of the range, or by a factor of two.
    move(how) {
      if (this.from === undefined) return;
      if (how === "back") { const last = this.trail.pop(); if (last) this.load(last[0], last[1]); return; }
      const half = (this.to - this.from) / 2, middle = this.from + half;
      const [centre, reach] = { earlier: [middle - half, half], later: [middle + half, half], "zoom in": [middle, half / 2], "zoom out": [middle, half * 2] }[how];
      this.zoom(centre - reach, centre + reach);
    }
    zoom(low, high) {
      this.trail.push([this.from, this.to]);
      for (const button of this.buttons) button.setAttribute("aria-pressed", "false");
      const middle = (low + high) / 2, half = Math.min(Math.max((high - low) / 2, LEAST / 2), MOST / 2);
      const from = Math.max(0, middle - half);
      this.load(from, from + 2 * half);
    }
    async load(from, to) {
      const url = new URL(this.place.dataset.due, location.href);
      url.searchParams.set("from", Math.round(from));
      url.searchParams.set("to", Math.round(to));
      // Answers may come in another order than the questions: only the last question counts.
      const turn = this.turn = (this.turn || 0) + 1;
      const found = await fetch(url).then((answer) => (answer.ok ? answer.json() : null)).catch(() => null);
      if (turn !== this.turn) return;
      if (!found) { this.says.textContent = "The counts are not to be had at the moment."; return; }
      this.from = from; this.to = to; this.found = found;
      this.list.href = this.address(Math.floor(from / 1000), Math.ceil(to / 1000));
      this.name();
      this.draw();
    }
    // The largest topics, each with a link to its messages.
    name() {
      const { topics, total } = this.found;
      const sums = topics.map(([, counts]) => counts.reduce((sum, one) => sum + one, 0)), rest = total - sums.reduce((sum, one) => sum + one, 0);
      this.legend.replaceChildren(...topics.map(([name], n) => {
        const item = document.createElement("li"), swatch = document.createElement("span"), link = document.createElement("a"), value = document.createElement("b");
        swatch.className = `swatch s${n}`;
        link.href = this.address(Math.floor(this.from / 1000), Math.ceil(this.to / 1000), name);
        link.textContent = name;
        value.textContent = sums[n].toLocaleString("en");
        item.append(swatch, link, " ", value);
        return item;
      }));
      if (topics.length && rest > 0) this.legend.insertAdjacentHTML("beforeend", `<li><span class="swatch"></span>others <b>${rest.toLocaleString("en")}</b></li>`);
    }
    // Bars from the whole down to the largest topic: each is drawn over those before it.
    layers() {
      const { count, topics } = this.found, sums = [];
      for (const [, counts] of topics) sums.push(counts.map((one, k) => Math.min(count[k], one + (sums.length ? sums[sums.length - 1][k] : 0))));
      return [[count, topics.length ? OTHERS : COLOURS[0]], ...sums.map((sum, n) => [sum, COLOURS[n]]).reverse()];
    }
    // A bar in words.
    bar(n) {
      const { at, count, step, topics } = this.found, parts = topics.filter(([, counts]) => counts[n]).map(([name, counts]) => `${name} ${counts[n].toLocaleString("en")}`);
      return `${count[n].toLocaleString("en")} from ${on(FULL, at[n])}, ${stepText(step)}${parts.length ? `: ${parts.join(", ")}` : ""}`;
    }
    draw() {
      if (this.chart) this.chart.destroy();
      const { at, step, total } = this.found, layers = this.layers();
      this.says.textContent = `${total.toLocaleString("en")} messages, a bar is ${stepText(step)}`;
      this.chart = new uPlot({
        width: this.place.clientWidth, height: this.place.clientHeight, tzDate: zoned, legend: { show: false },
        cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
        scales: { x: { time: true, range: () => [Math.min(this.from / 1000, at[0]), Math.max(this.to / 1000, at[at.length - 1] + step)] }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
        axes: axes(""),
        series: [{}, ...layers.map(([, colour]) => ({ stroke: colour, fill: colour + (layers.length > 1 ? "" : "aa"), width: 1, paths: uPlot.paths.bars({ size: [0.85, 40], align: 1 }), points: { show: false } }))],
        hooks: {
          setSelect: [(chart) => {
            if (chart.select.width < 6) return;
            const low = chart.posToVal(chart.select.left, "x") * 1000, high = chart.posToVal(chart.select.left + chart.select.width, "x") * 1000;
            chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            this.zoom(low, high);
          }],
          setCursor: [(chart) => {
            const n = chart.cursor.idx;
            if (n !== null && n !== undefined) this.says.textContent = this.bar(n);
          }],
        },
      }, [at, ...layers.map(([counts]) => counts)], this.place);
    }
  }

  function stepText(step) {
    for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60]]) if (step % size === 0) return step === size ? `one ${unit}` : `${step / size} ${unit}s`;
    return step === 1 ? "one second" : `${step} seconds`;
  }

  const lines = [...document.querySelectorAll("[data-chart]")].map((place) => new Lines(place));
  const dues = [...document.querySelectorAll("[data-due]")].map((place) => new Due(place));
  const live = document.querySelector("[data-stream]") !== null;
  // A page without a stream asks again until there is something to show.
  async function load() {
    const series = await fetch(home.dataset.charts).then((answer) => (answer.ok ? answer.json() : null)).catch(() => null);
    if (series) lines.forEach((one) => one.set(series)); else lines.forEach((one) => one.say("The chart could not be loaded; the page tries again."));
    if (!series || (!live && !series.at.length)) setTimeout(load, SAMPLE * 1000);
  }
  load();
  document.addEventListener("hadelay:frame", (event) => {
    const point = event.detail.point;
    if (point && lines.length && lines[0].misses(point)) load();
    else if (point) lines.forEach((one) => one.add(point));
  });

  const redraw = () => { lines.forEach((one) => one.draw()); dues.forEach((one) => one.found && one.draw()); };
  let waiting = 0;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 150); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
})();
