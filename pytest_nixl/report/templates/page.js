// SPDX-License-Identifier: Apache-2.0
// Sort a table by a column when the button in its heading is pressed; the other direction when it is pressed again.
for (const table of document.querySelectorAll("table.sortable")) {
  table.closest("section")?.querySelector("p.soft")?.append(" Press a heading to sort by it.");
}
for (const button of document.querySelectorAll("table.sortable th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = button.closest("table"), body = table.tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent;
    const compare = (a, b) => {
      const [x, y] = [Number(value(a)), Number(value(b))];
      return Number.isNaN(x) || Number.isNaN(y) ? value(a).localeCompare(value(b)) : x - y;
    };
    body.append(...[...body.rows].sort((a, b) => (up ? compare(a, b) : compare(b, a))));
  });
}
// Copy a command when its button is pressed. The buttons are hidden where no script runs.
for (const button of document.querySelectorAll("button.copy")) {
  const code = button.previousElementSibling;
  button.setAttribute("aria-label", `Copy: ${code.textContent}`);
  button.hidden = false;
  button.addEventListener("click", async () => {
    let copied = true;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {  // a page of plain http has no clipboard
      getSelection().selectAllChildren(code);
      copied = document.execCommand("copy");
    }
    button.textContent = copied ? "Copied" : "Press Ctrl-C";
  });
}
// Leave the rows of the tables that match the filter. The filter is hidden where no script runs.
const filter = document.querySelector("form.filter");
if (filter) {
  const rows = [...document.querySelectorAll("tr[data-verdict]")], selects = [...filter.querySelectorAll("select")];
  const values = (row, name) => row.dataset[name].split(" ").filter(Boolean);
  for (const select of selects) {
    const found = [...new Set(rows.flatMap((row) => values(row, select.name)))].sort();
    select.append(...found.map((value) => new Option(value)));
    select.parentElement.hidden = found.length < 2;
  }
  const apply = () => {
    const words = filter.querySelector("input").value.toLowerCase();
    for (const row of rows) {
      const fits = selects.every((select) => !select.value || values(row, select.name).includes(select.value));
      row.hidden = !(fits && row.textContent.toLowerCase().includes(words));
    }
    filter.querySelector("output").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  };
  filter.hidden = false;
  filter.addEventListener("input", apply);
  filter.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => {  // a link leads also to a row that the filter has hidden
    const row = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!row?.hidden) return;
    filter.reset();
    apply();
    row.scrollIntoView();
  });
  apply();
}
// Write the value of a chart's point below it: of the one nearest to the pointer, or of the next one by the arrow keys.
for (const svg of document.querySelectorAll("figure svg")) {
  const points = [...svg.querySelectorAll(".point")].filter((point) => point.querySelector("title"));
  if (!points.length) continue;
  const output = document.createElement("output");
  output.textContent = "Point at the chart, or use the arrow keys, for its values.";
  svg.after(output);
  svg.tabIndex = 0;
  let place = -1;
  const show = (next) => {
    points[place]?.classList.remove("on");
    place = (next + points.length) % points.length;
    points[place].classList.add("on");
    output.textContent = points[place].querySelector("title").textContent;
  };
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(place < 0 && step < 0 ? points.length - 1 : place + step);
  });
  svg.addEventListener("pointermove", (event) => {
    const far = points.map((point) => {
      const box = point.getBoundingClientRect();
      const across = Math.max(box.left - event.clientX, 0, event.clientX - box.right);
      return Math.hypot(across, Math.max(box.top - event.clientY, 0, event.clientY - box.bottom));
    });
    show(far.indexOf(Math.min(...far)));
  });
}
