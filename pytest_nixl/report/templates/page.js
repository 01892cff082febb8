// SPDX-License-Identifier: Apache-2.0
// Sort a table by a column when the button in its heading is pressed; the other direction when it is pressed again.
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
  button.setAttribute("aria-label", `Copy the command ${code.textContent}`);
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
