// Work by keyboard and by hand on lists: shortcuts, the choice of rows, copies to the clipboard, names of topics.
(() => {
  "use strict";
  const all = (selector, place = document) => [...place.querySelectorAll(selector)];
  const make = (tag, words, of = {}) => Object.assign(document.createElement(tag), { textContent: words, ...of });
  document.documentElement.classList.add("js");

  // ---- shortcuts: / searches, g and a letter opens a page, j and k move along rows, x chooses one, ? explains
  const pages = new Map(all("nav a[data-key]").map((link) => [link.dataset.key, link]));
  // Time for which a g waits for its letter, in ms.
  const WAIT = 1500;
  let went = 0, help = null;

  function rowLinks() { return all("main tbody tr").map((row) => row.querySelector("a[href]")).filter(Boolean); }

  function step(by) {
    const links = rowLinks(), row = document.activeElement.closest("main tbody tr");
    const now = row ? links.indexOf(row.querySelector("a[href]")) : by > 0 ? -1 : links.length;
    const next = links[Math.min(Math.max(now + by, 0), links.length - 1)];
    if (next) next.focus();
  }

  function explain() {
    if (!help) {
      const keys = [["/", "search"], ...[...pages].map(([key, link]) => [`g ${key}`, link.querySelector("span").textContent]), ["j k", "next and previous row"], ["x", "choose the row"], ["?", "this list"], ["Esc", "close"]];
      const list = document.createElement("dl");
      for (const [key, words] of keys) list.append(make("dt", key), make("dd", words));
      help = make("dialog", "", { className: "keys" });
      const close = make("button", "Close");
      close.addEventListener("click", () => help.close());
      help.setAttribute("aria-labelledby", "keys-title");
      help.append(make("h2", "Keys", { id: "keys-title" }), list, close);
      document.body.append(help);
    }
    if (!help.open) help.showModal();
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (event.target.closest("input:not([type=checkbox]), select, textarea, [contenteditable]")) return;
    const second = Date.now() - went < WAIT, search = document.getElementById("search");
    went = 0;
    if (second && pages.has(event.key)) pages.get(event.key).click();
    else if (event.key === "g") went = Date.now();
    else if (event.key === "/" && search) { search.focus(); search.select(); }
    else if (event.key === "?") explain();
    else if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
    else if (event.key === "x") { const row = document.activeElement.closest("tr"), box = row && row.querySelector("input[type=checkbox]"); if (!box) return; box.click(); }
    else return;
    event.preventDefault();
  });
  for (const button of all("[data-explain]")) { button.hidden = false; button.addEventListener("click", explain); }

  // ---- the choice of rows: a box for all rows of the page, and how many are chosen. The choice goes along from page to
  // page of a list, until it is sent.
  function choose(form) {
    const boxes = all("tbody input[name=id]", form), says = form.querySelector(".chosen"), whole = form.querySelector("input[name=all]");
    const head = form.querySelector("thead th.choose"), bar = form.querySelector(".chooser");
    if (!boxes.length || !says) return;
    const list = all("input[type=hidden]:not([name=csrf])", form).map((one) => one.value);
    const name = `chosen ${location.pathname} ${JSON.stringify(list)}`, chosen = new Set(JSON.parse(sessionStorage.getItem(name) || "[]"));
    const page = make("input", "", { type: "checkbox" }), none = make("button", "none", { type: "button", className: "quiet" });
    page.setAttribute("aria-label", "Choose all rows of this page");
    none.setAttribute("aria-label", "Choose none");
    head.replaceChildren(page);
    says.after(none);
    const keep = () => (chosen.size ? sessionStorage.setItem(name, JSON.stringify([...chosen])) : sessionStorage.removeItem(name));
    const elsewhere = () => [...chosen].filter((value) => !boxes.some((box) => box.value === value));
    const tell = () => {
      for (const box of boxes) if (box.checked) chosen.add(box.value); else chosen.delete(box.value);
      keep();
      const count = chosen.size, here = boxes.filter((box) => box.checked).length, every = whole && whole.checked;
      page.checked = here === boxes.length;
      page.indeterminate = here > 0 && here < boxes.length;
      says.textContent = every ? "all are chosen" : `${count} chosen${count > here ? `, ${count - here} of them on other pages` : ""}`;
      none.hidden = !count || every;
      bar.classList.toggle("some", count > 0 || every);
      for (const button of all("button:not([type=button])", bar)) button.disabled = !count && !every;
    };
    page.addEventListener("change", () => { for (const box of boxes) box.checked = page.checked; });
    none.addEventListener("click", () => { chosen.clear(); for (const box of boxes) box.checked = false; tell(); });
    form.addEventListener("change", tell);
    form.addEventListener("formdata", (event) => { for (const value of elsewhere()) event.formData.append("id", value); });
    form.addEventListener("hadelay:done", () => sessionStorage.removeItem(name));
    for (const box of boxes) box.checked = box.checked || chosen.has(box.value);
    tell();
  }
  for (const form of all("form.choose")) choose(form);
  document.addEventListener("hadelay:shown", (event) => { for (const form of all("form.choose", event.target)) choose(form); });

  // ---- copies. Without HTTPS a browser has no clipboard of its own: the text is selected and copied as of old.
  async function copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const field = make("textarea", "", { value: text, className: "hidden" });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy], [data-copy-from]");
    if (!button) return;
    const { copy: text, copyFrom: from } = button.dataset;
    const done = await (from ? fetch(from).then((answer) => answer.text()) : Promise.resolve(text)).then(copy).then(() => "copied", () => "not copied");
    button.dataset.done = done;
    setTimeout(() => delete button.dataset.done, 2000);
  });

  // ---- names of topics, offered while a person types
  const names = make("datalist", "", { id: "topic-names" });
  let turn = 0;
  async function offer(field) {
    const mine = ++turn, url = new URL("/console/names", location.href);
    url.searchParams.set("q", field.value);
    const found = await fetch(url).then((answer) => (answer.ok ? answer.json() : [])).catch(() => []);
    if (mine === turn) names.replaceChildren(...found.map((name) => make("option", "", { value: name })));
  }
  for (const field of all("input[data-topics]")) {
    document.body.append(names);
    field.setAttribute("list", "topic-names");
    for (const kind of ["focus", "input"]) field.addEventListener(kind, () => offer(field));
  }
})();
