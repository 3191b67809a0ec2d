// Sorts the rows of a table by the column whose head is pressed.

(function sortableTables() {
  const value = (row, column) => {
    const cell = row.cells[column];
    if (!cell) return ""; // a row that ends in a text for several columns
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent) return; // of bars
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows].map((row) => [value(row, column), row]);
        rows.sort(([a], [b]) => (a < b ? 1 : a > b ? -1 : 0) * (down ? 1 : -1));
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  }
})();
