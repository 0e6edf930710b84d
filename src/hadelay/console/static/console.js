// The script of the console: one stream of events per page, closed while the page is hidden, and the loading of charts.
(() => {
  "use strict";
  const stage = document.querySelector("[data-stream]");
  const notice = document.getElementById("live-notice");
  let source = null, reopens = false, wait = 1000, leader = text("leader"), pressed = false;
  //: Limit of the time for which an update waits for a person's selection, in milliseconds.
  const PATIENCE = 30000;
  // Subject of a notice -> [words, tone]; the page shows the first of SUBJECTS that has words.
  const notices = new Map(), SUBJECTS = ["link", "problem", "state", "leader"];
  // Id of an element -> [its new HTML, when it came], for updates that are not shown yet.
  const updates = new Map();

  function text(id) { const found = document.getElementById(id); return found ? found.textContent : ""; }

  function say(subject, words, tone = "warn") {
    if (words) notices.set(subject, [words, tone]); else notices.delete(subject);
    const shown = notices.get(SUBJECTS.find((one) => notices.has(one)));
    notice.hidden = !shown;
    if (!shown || notice.textContent === shown[0]) return;
    notice.textContent = shown[0];
    notice.className = "notice " + shown[1];
  }

  // An update must not take away what a person holds: a link between press and release, a selection, the focus.
  function selects(place) {
    const chosen = document.getSelection();
    return !chosen.isCollapsed && chosen.containsNode(place, true);
  }

  function update() {
    if (pressed) return;
    for (const [id, [html, at]] of updates) {
      const place = document.getElementById(id);
      if (place && selects(place) && Date.now() - at < PATIENCE) continue;
      updates.delete(id);
      if (!place) continue;
      const focused = place.contains(document.activeElement) && document.activeElement.getAttribute("href");
      // Alarms that end leave their space: nothing below moves while somebody aims at it.
      if (place.classList.contains("alarm-box")) place.style.minHeight = `${place.getBoundingClientRect().height}px`;
      place.innerHTML = html;
      const same = focused && [...place.querySelectorAll("a[href]")].find((one) => one.getAttribute("href") === focused);
      if (same) same.focus({ preventScroll: true });
    }
  }

  function take(frame) {
    for (const [id, html] of Object.entries(frame.html || {})) updates.set(id, [html, updates.has(id) ? updates.get(id)[1] : Date.now()]);
    update();
    if (frame.leader !== undefined && frame.leader !== leader) {
      const at = new Date().toISOString().slice(11, 19);
      document.getElementById("leader").textContent = frame.leader || "nobody";
      document.getElementById("leader-dot").className = "dot " + (frame.leader ? "good" : "bad");
      say("leader", frame.leader ? `Leader changed: ${frame.leader} leads since ${at} UTC.` : `No leader since ${at} UTC; the page goes on when there is one.`);
      const stale = document.getElementById("stale");
      if (stale && frame.leader) stale.textContent = "There is a leader again: reload the page.";
      leader = frame.leader;
    }
    if (frame.state && stage.dataset.state && frame.state !== stage.dataset.state) {
      say("state", `The ${stage.dataset.noun || "message"} is ${frame.state} now. Reload the page for what can be done with it.`, "good");
      stage.dataset.state = frame.state;
    }
    say("problem", frame.problem);
    document.dispatchEvent(new CustomEvent("hadelay:frame", { detail: frame }));
  }

  function again(words) {
    close();
    say("link", words);
    setTimeout(open, wait);
    wait = Math.min(wait * 2, 30000);
  }

  function open() {
    if (source || !stage || document.hidden) return;
    const url = new URL(stage.dataset.stream, location.href);
    if (reopens) url.searchParams.set("again", "1");
    reopens = true;
    source = new EventSource(url);
    source.addEventListener("frame", (event) => { wait = 1000; take(JSON.parse(event.data)); });
    source.addEventListener("over", (event) => { close(); say("link", event.data); });
    source.addEventListener("later", (event) => again(event.data));
    source.onerror = () => again("No news from this node at the moment; the page tries again.");
    source.onopen = () => say("link", "");
  }

  // Run after the first paint; in a page that is hidden from the start, once it is shown.
  function painted(run) {
    const tells = (PerformanceObserver.supportedEntryTypes || []).includes("paint");
    if (!tells || performance.getEntriesByName("first-contentful-paint").length) run();
    else new PerformanceObserver((_, observer) => { observer.disconnect(); painted(run); }).observe({ type: "paint", buffered: true });
  }

  function close() { if (source) { source.close(); source = null; } }

  // On a narrow screen the navigation scrolls: show where we are.
  const current = document.querySelector(".side nav [aria-current]");
  if (current && current.parentElement.scrollWidth > current.parentElement.clientWidth) current.parentElement.scrollLeft = current.offsetLeft - 40;

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", () => painted(open));

  // The page is complete without charts: their files are loaded after its first paint, the style before the scripts.
  const charts = document.querySelector("meta[name=charts]");
  if (charts) painted(() => {
    const [style, ...scripts] = charts.content.split(" ");
    const link = Object.assign(document.createElement("link"), { rel: "stylesheet", href: style });
    link.onload = () => { for (const src of scripts) document.head.append(Object.assign(document.createElement("script"), { src, async: false })); };
    document.head.append(link);
  });

  document.addEventListener("pointerdown", () => { pressed = true; }, true);
  // The click follows the release.
  for (const end of ["pointerup", "pointercancel", "dragend"]) document.addEventListener(end, () => { pressed = false; setTimeout(update); }, true);

  // Only one of the forms behind "…" is open at a time; Escape closes it. The click itself opens the form and moves the
  // focus: the browser's toggle event comes later, and keys that a person types before it would go to the summary.
  document.addEventListener("click", (event) => {
    const summary = event.target.closest("details.confirm > summary");
    if (!summary) return;
    event.preventDefault();
    const one = summary.parentElement;
    one.open = !one.open;
    if (!one.open) return;
    for (const other of document.querySelectorAll("details.confirm[open]")) if (other !== one) other.open = false;
    const field = one.querySelector("input:not([type=hidden]):not([type=checkbox]), select, button");
    if (field) field.focus();
  });
  // A held Enter opens such a form once: its repetitions must not confirm what nobody has read.
  document.addEventListener("keydown", (event) => {
    if (event.repeat && event.key === "Enter" && event.target.closest("details.confirm")) event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const one of document.querySelectorAll("details.confirm[open]")) { one.open = false; one.querySelector("summary").focus(); }
  });
})();
