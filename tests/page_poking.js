window.addEventListener("load", () => {
  const said = [];
  const chart = document.querySelector("svg[data-x]");
  if (chart) {
    const box = chart.getBoundingClientRect();
    const where = { clientX: box.left + box.width / 2, clientY: box.top + 5, bubbles: true };
    chart.dispatchEvent(new PointerEvent("pointermove", where));
    said.push([...document.querySelectorAll("figure output")].map((one) => one.textContent).join(" | "));
    said.push([...document.querySelectorAll("line.cursor")].map((one) => parseFloat(one.getAttribute("x1")).toFixed(1)).join(" "));
  }
  const slider = document.querySelector(".explorer input");
  if (slider)
    for (const value of [slider.min, slider.defaultValue, slider.max]) {
      slider.value = value;
      slider.dispatchEvent(new Event("input"));
      const marked = [...document.querySelectorAll("[data-rows=ways] tr.marked")].map((row) => row.rowIndex);
      said.push(`${document.querySelector(".explorer output").textContent} // ${marked} // ${document.querySelectorAll("circle.chosen").length}`);
    }
  said.push("");
  document.title = JSON.stringify(said);
});
