// The script of the console: one stream of events per page, closed while the page is hidden, and charts.
(() => {
  "use strict";
  const stage = document.querySelector("[data-stream]");
  const notice = document.getElementById("live-notice");
  let source = null, wait = 1000, leader = text("leader");

  function text(id) { const found = document.getElementById(id); return found ? found.textContent : ""; }

  function say(words, tone) {
    if (!notice) return;
    notice.hidden = !words;
    notice.textContent = words;
    notice.className = "notice " + (tone || "warn");
  }

  function take(frame) {
    for (const [id, html] of Object.entries(frame.html || {})) {
      const place = document.getElementById(id);
      if (place && !place.contains(document.activeElement)) place.innerHTML = html;
    }
    if (frame.leader !== undefined && frame.leader !== leader) {
      const place = document.getElementById("leader");
      if (place) place.textContent = frame.leader || "nobody";
      const at = new Date().toISOString().slice(11, 19);
      say(frame.leader ? `Leader changed: ${frame.leader} leads since ${at} UTC.` : `No leader since ${at} UTC; the page goes on when there is one.`);
      leader = frame.leader;
    }
    if (frame.state && stage.dataset.state && frame.state !== stage.dataset.state) {
      say(`The message is ${frame.state} now. Reload the page for what can be done with it.`, "good");
      stage.dataset.state = frame.state;
    }
    if (frame.problem) say(frame.problem);
    document.dispatchEvent(new CustomEvent("hadelay:frame", { detail: frame }));
  }

  function open() {
    if (source || !stage || document.hidden) return;
    source = new EventSource(stage.dataset.stream);
    source.addEventListener("frame", (event) => { wait = 1000; take(JSON.parse(event.data)); });
    source.addEventListener("over", (event) => { close(); say(event.data); });
    source.onerror = () => {
      close();
      say("This node does not answer at the moment; the page tries again.");
      setTimeout(open, wait);
      wait = Math.min(wait * 2, 30000);
    };
    source.onopen = () => { if (notice && notice.textContent.startsWith("This node does not answer")) say(""); };
  }

  function close() { if (source) { source.close(); source = null; } }

  // On a narrow screen the navigation scrolls: show where we are.
  const current = document.querySelector(".side nav [aria-current]");
  if (current && current.parentElement.scrollWidth > current.parentElement.clientWidth) current.parentElement.scrollLeft = current.offsetLeft - 40;

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);

  // Only one of the forms behind "…" is open at a time; Escape closes it.
  document.addEventListener("toggle", (event) => {
    const one = event.target;
    if (!one.matches || !one.matches("details.confirm") || !one.open) return;
    for (const other of document.querySelectorAll("details.confirm[open]")) if (other !== one) other.open = false;
    const field = one.querySelector("input:not([type=hidden]):not([type=checkbox]), button");
    if (field) field.focus();
  }, true);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const one of document.querySelectorAll("details.confirm[open]")) { one.open = false; one.querySelector("summary").focus(); }
  });
})();
