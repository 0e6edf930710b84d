// The script of the console: one stream of events per page, closed while the page is hidden, and the loading of charts.
(() => {
  "use strict";
  // Element whose stream keeps the page up to date; that of the frame alone tells of the leader and of problems.
  const stage = () => document.querySelector("#main [data-stream]") || document.getElementById("main");
  const zone = document.documentElement.dataset.zone;
  const notice = document.getElementById("live-notice");
  let source = null, address = "", reopens = false, wait = 1000, leader = text("leader"), pressed = false, fades = 0, renewed = 0, later = 0;
  //: Time for which the page tells of a new leader or of another state, in milliseconds.
  const TELLS = 20000;
  //: Limit of the time for which an update waits for a person's selection, in milliseconds.
  const PATIENCE = 30000;
  // Subject of a notice -> [words, tone]; the page shows the first of SUBJECTS that has words.
  const notices = new Map(), SUBJECTS = ["form", "link", "problem", "state", "leader"];
  // Id of an element -> [its new HTML, when it came], for updates that are not shown yet.
  const updates = new Map();

  function text(id) { const found = document.getElementById(id); return found ? found.textContent : ""; }

  function say(subject, words, tone = "warn") {
    if (words) notices.set(subject, [words, tone]); else notices.delete(subject);
    const shown = notices.get(SUBJECTS.find((one) => notices.has(one)));
    if (notice) notice.hidden = !shown;
    if (subject === "link") mark();
    if (!notice || !shown || notice.textContent === shown[0]) return;
    notice.textContent = shown[0];
    notice.className = "notice " + shown[1];
  }

  // News that need no action go away by themselves.
  function news(subject, words, tone) {
    say(subject, words, tone);
    clearTimeout(fades);
    fades = setTimeout(() => { say("state", ""); say("leader", ""); }, TELLS);
  }

  // A page without news says nothing about who leads now.
  function mark() {
    const dot = document.getElementById("leader-dot");
    if (dot) dot.className = "dot " + (notices.has("link") ? "" : leader && leader !== "nobody" ? "good" : "bad");
  }

  // An update must not take away what a person holds: a link between press and release, a selection, the focus.
  function selects(place) {
    const chosen = document.getSelection();
    return !chosen.isCollapsed && chosen.containsNode(place, true);
  }

  // A form that somebody fills in stays until it is closed.
  function fills(place) {
    return place.querySelector("details.confirm[open]") !== null || [...place.querySelectorAll("input:not([type=hidden]), textarea")].some((one) => one.type === "checkbox" ? one.checked !== one.defaultChecked : one.value !== one.defaultValue);
  }

  function update() {
    if (pressed) return;
    for (const [id, [html, at]] of updates) {
      const place = document.getElementById(id);
      if (place && ((selects(place) && Date.now() - at < PATIENCE) || fills(place))) continue;
      updates.delete(id);
      if (!place) continue;
      const focused = place.contains(document.activeElement) && document.activeElement.getAttribute("href");
      // Alarms that end leave their space: nothing below moves while somebody aims at it.
      if (place.classList.contains("alarm-box")) place.style.minHeight = `${place.getBoundingClientRect().height}px`;
      const open = [...place.querySelectorAll("details")].map((one) => one.open);
      place.innerHTML = html;
      place.querySelectorAll("details").forEach((one, n) => { if (open[n]) one.open = true; });
      place.dispatchEvent(new CustomEvent("hadelay:shown", { bubbles: true }));
      const same = focused && [...place.querySelectorAll("a[href]")].find((one) => one.getAttribute("href") === focused);
      if (same) same.focus({ preventScroll: true });
    }
  }

  function take(frame) {
    for (const [id, html] of Object.entries(frame.html || {})) updates.set(id, [html, updates.has(id) ? updates.get(id)[1] : Date.now()]);
    const place = stage(), turned = frame.state && place.dataset.state && frame.state !== place.dataset.state;
    if (!turned) update();
    if (frame.leader !== undefined && frame.leader !== leader) {
      document.getElementById("leader").textContent = frame.leader || "nobody";
      const since = frame.since ? ` since ${new Date(frame.since).toLocaleTimeString("en-GB", { timeZone: zone })}` : "";
      if (frame.leader) news("leader", `Leader changed: ${frame.leader} leads${since}.`);
      else say("leader", "There is no leader at the moment; the page goes on when there is one.");
      leader = frame.leader;
      mark();
      if (frame.leader && document.getElementById("stale")) renew();
    }
    if (frame.problems !== undefined) {
      for (const badge of document.querySelectorAll(".problems")) { badge.textContent = frame.problems; badge.hidden = !frame.problems; }
      document.title = (frame.problems ? `(${frame.problems}) ` : "") + document.title.replace(/^\(\d+\) /, "");
    }
    if (turned) {
      if (place.dataset.noun) news("state", `The ${place.dataset.noun} is ${frame.state} now.`, "good");
      place.dataset.state = frame.state;
      renew();
    }
    say("problem", frame.problem);
    document.dispatchEvent(new CustomEvent("hadelay:frame", { detail: frame }));
  }

  // Take the parts of the page that depend on the person's rights, such as actions, from the page as it is now.
  async function renew() {
    // At most every five seconds, and once more after the last change.
    const pause = renewed + 5000 - Date.now();
    if (pause > 0) { clearTimeout(later); later = setTimeout(renew, pause); update(); return; }
    renewed = Date.now();
    const page = await fetch(location.href, { headers: { Accept: "*/*" } }).then((found) => (found.ok ? found.text() : "")).catch(() => "");
    const fresh = new DOMParser().parseFromString(page, "text/html");
    for (const own of document.querySelectorAll("[data-own]")) {
      const other = fresh.getElementById(own.id);
      if (other) updates.set(own.id, [other.innerHTML, Date.now()]);
    }
    const stale = document.getElementById("stale");
    if (stale && page && !fresh.getElementById("stale")) stale.remove();
    update();
  }

  function again(words) {
    close();
    say("link", words);
    setTimeout(open, wait);
    wait = Math.min(wait * 2, 30000);
  }

  function open() {
    address = stage() && stage().dataset.stream;
    if (source || !address || document.hidden) return;
    const url = new URL(address, location.href);
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

  // A part that htmx put into the page may have another stream.
  document.addEventListener("htmx:afterSettle", () => { if (stage().dataset.stream !== address) { close(); reopens = false; open(); } });

  function close() { if (source) { source.close(); source = null; } }

  for (const one of document.querySelectorAll("[data-gone]")) setTimeout(() => one.remove(), one.dataset.gone);

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", () => painted(open));

  // The page is complete without charts: their files are loaded after its first paint, the style before the scripts.
  const charts = document.getElementById("chart-files");
  if (charts) painted(() => {
    const [style, ...scripts] = [...charts.content.children].map((one) => one.getAttribute("href") || one.getAttribute("src"));
    const link = Object.assign(document.createElement("link"), { rel: "stylesheet", href: style });
    link.onload = () => { for (const src of scripts) document.head.append(Object.assign(document.createElement("script"), { src, async: false })); };
    document.head.append(link);
  });

  // Times left, beside times.
  function span(ms) {
    let left = Math.floor(ms / 1000);
    const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].map(([unit, size]) => { const n = Math.floor(left / size); left %= size; return n ? `${n} ${unit}` : ""; });
    const first = parts.findIndex(Boolean);
    return first < 0 ? "0 s" : parts.slice(first, first + 2).filter(Boolean).join(" ");
  }
  setInterval(() => {
    for (const one of document.querySelectorAll("[data-at]")) {
      const left = one.dataset.at - Date.now(), far = Math.abs(left) < 60000 ? Math.abs(left) : Math.abs(left) - Math.abs(left) % 60000;
      one.textContent = left >= 0 ? `in ${span(far)}` : `${span(far)} ago`;
    }
  }, 5000);

  // The browser's own zone, and the names of all zones once somebody asks for them.
  const own = document.getElementById("own-zone");
  if (own) {
    own.value = own.textContent = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
    own.hidden = own.value === "UTC";
    document.querySelector(".zone > summary").addEventListener("click", () => {
      const list = document.getElementById("zones");
      if (!list.children.length) list.append(...Intl.supportedValuesOf("timeZone").map((name) => Object.assign(document.createElement("option"), { value: name })));
    });
  }

  document.addEventListener("pointerdown", () => { pressed = true; }, true);
  // The click follows the release.
  for (const end of ["pointerup", "pointercancel", "dragend"]) document.addEventListener(end, () => { pressed = false; setTimeout(update); }, true);

  // A form is sent by script: an error appears at its field, and the form stays as it is. Without scripts, the answer is
  // a redirect in any case.
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (event.defaultPrevented || form.getAttribute("method") !== "post" || [form, event.submitter].some((one) => one && one.hasAttribute("data-plain"))) return;
    event.preventDefault();
    if (!sent.has(form)) send(form, event.submitter);
  });

  const sent = new Set();
  window.addEventListener("pageshow", () => sent.clear());

  async function send(form, button) {
    sent.add(form);
    const body = new URLSearchParams(new FormData(form)), where = (button && button.getAttribute("formaction")) || form.getAttribute("action");
    if (button && button.name) body.append(button.name, button.value);
    const silent = { words: "This node gave no answer. It is not known whether this was done: look before you repeat it.", field: "" };
    const answer = await fetch(where, { method: "POST", body, headers: { Accept: "application/json" } }).then(async (found) => ({ status: found.status, ...(await found.json()) })).catch(() => silent);
    if (answer.go) { form.dispatchEvent(new CustomEvent("hadelay:done")); leave(new URL(answer.go, location.href)); return; }
    if (answer.status === 403 && await secret()) answer.words = "You signed in again since this page was opened. Nothing was changed yet: send the form once more.";
    sent.delete(form);
    show(form, answer);
  }

  // Give all forms the secret of the present session, so that what a person typed survives a new sign-in. Returns whether
  // the secret is another one.
  async function secret() {
    const page = await fetch(location.href, { headers: { Accept: "*/*" } }).then((found) => (found.ok ? found.text() : "")).catch(() => "");
    const fresh = new DOMParser().parseFromString(page, "text/html").querySelector("input[name=csrf]");
    const old = [...document.querySelectorAll("input[name=csrf]")].filter((one) => fresh && one.value !== fresh.value);
    for (const one of old) one.value = fresh.value;
    return old.length > 0;
  }

  // A page that an action leads to is loaded anew, also if it is this one.
  function leave(to) {
    if (to.pathname + to.search !== location.pathname + location.search) location.assign(to);
    else { history.replaceState(null, "", to); location.reload(); }
  }

  // Show a problem at its field; else at the top of the form; else, if the form is a button alone, at the page's bottom.
  function show(form, { detail, words = detail, field = "" }) {
    clear(form);
    const own = [...form.elements].filter((one) => one.type !== "hidden" && one.tagName !== "BUTTON" && one.tagName !== "FIELDSET");
    const at = field && own.find((one) => one.name === field);
    if (!own.length) { say("form", words, "bad"); return; }
    const place = Object.assign(document.createElement("p"), { className: at ? "wrong" : "wrong notice bad", id: "wrong", textContent: words });
    place.setAttribute("role", "alert");
    if (!at) { form.prepend(place); return; }
    const holder = at.closest("fieldset, label") || at;
    if (holder.parentElement.matches(".row")) holder.parentElement.after(place); else holder.after(place);
    at.setAttribute("aria-invalid", "true");
    at.setAttribute("aria-describedby", `${at.getAttribute("aria-describedby") || ""} wrong`.trim());
    at.focus();
  }

  function clear(form) {
    say("form", "");
    for (const old of document.querySelectorAll("#wrong")) old.remove();
    for (const one of form.querySelectorAll("[aria-invalid]")) one.removeAttribute("aria-invalid");
  }

  // The problem of a form that was sent by GET comes with its page.
  for (const place of document.querySelectorAll("[data-field]")) {
    const form = [...document.forms].find((one) => one.getAttribute("method") === "get" && one.elements.namedItem(place.dataset.field));
    if (!form) continue;
    show(form, { words: place.textContent, field: place.dataset.field });
    place.remove();
  }

  // Only one of the forms behind "…" is open at a time; Escape closes it. The click itself opens the form and moves the
  // focus: the browser's toggle event comes later, and keys that a person types before it would go to the summary.
  document.addEventListener("click", (event) => {
    const summary = event.target.closest("details.confirm > summary");
    if (!summary) return;
    event.preventDefault();
    const one = summary.parentElement;
    if (event.detail > 1) return;  // the second click of a double click
    const opens = !one.open;
    fold();
    if (!opens) return;
    one.open = true;
    put(one);
    const field = one.querySelector("input:not([type=hidden]):not([type=checkbox]), select, button");
    if (field) field.focus();
  });
  // The form lies over the page, below its button or above, wherever there is room: nothing else moves.
  function put(one) {
    const form = one.querySelector("form"), button = one.firstElementChild.getBoundingClientRect(), edge = 12;
    form.popover = "manual";
    if (!form.matches(":popover-open")) form.showPopover();
    const { width, height } = form.getBoundingClientRect(), right = document.documentElement.clientWidth - edge;
    const above = button.bottom + height + edge > innerHeight && button.top > height + edge;
    form.style.left = `${scrollX + Math.max(edge, Math.min(button.left, right - width))}px`;
    form.style.top = `${scrollY + (above ? button.top - height - 6 : button.bottom + 6)}px`;
  }
  const opened = () => document.querySelector("details.confirm[open]");
  function fold() {
    const one = opened();
    if (!one) return;
    one.open = false;
    one.querySelector("form").hidePopover();
    update();
  }
  document.addEventListener("pointerdown", (event) => { if (opened() && !opened().contains(event.target)) fold(); });
  window.addEventListener("resize", () => { if (opened()) put(opened()); });
  // An Enter key kept down opens such a form once: its repetitions must not confirm what nobody has read.
  document.addEventListener("keydown", (event) => {
    if (event.repeat && event.key === "Enter" && event.target.closest("details.confirm")) event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !opened()) return;
    opened().querySelector("summary").focus();
    fold();
  });
})();
