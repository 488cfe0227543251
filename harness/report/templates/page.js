for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copy).textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      button.focus();
    }
    const before = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = before; }, 1500);
  });
}
const filter = document.getElementById("filter");
if (filter) {
  document.getElementById("filter-line").hidden = false;
  const rows = [...document.querySelectorAll("#all-results tbody tr")].map((row) => [row, row.textContent.toLowerCase()]);
  const shown = document.getElementById("filter-count");
  const apply = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const [row, text] of rows) {
      row.hidden = !words.every((word) => text.includes(word));
      count += row.hidden ? 0 : 1;
    }
    if (words.length) document.getElementById("all-results").open = true;
    shown.textContent = `${count} of ${rows.length}`;
  };
  filter.addEventListener("input", apply);
  apply();
}
