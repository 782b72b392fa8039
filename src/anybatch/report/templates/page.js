"use strict";
// One cursor over all charts over steps; the page works without a script too.
(() => {
  const charts = [...document.querySelectorAll("svg[data-x]")].map((svg) => {
    const [first, last, pivot, left, right] = JSON.parse(svg.dataset.x);
    const warp = (step) => (pivot ? Math.log1p((step - first) / pivot) : step - first);
    const width = svg.viewBox.baseVal && svg.viewBox.baseVal.width;
    const line = document.createElementNS(svg.namespaceURI, "line");
    line.setAttribute("class", "cursor");
    line.setAttribute("y1", 0);
    line.setAttribute("y2", "100%");
    const output = document.createElement("output");
    const values = Object.entries(JSON.parse(svg.dataset.values || "{}"));
    if (values.length) svg.closest("figure").insertBefore(output, svg.closest("figure").lastElementChild);
    return {
      svg, output, values, line,
      place: (step) => left + ((right - left) * warp(step)) / warp(last),
      step: (event) => {
        const box = svg.getBoundingClientRect();
        const x = ((event.clientX - box.left) / box.width) * (width || 100);
        const part = Math.min(1, Math.max(0, (x - left) / (right - left))) * warp(last);
        return first + (pivot ? pivot * Math.expm1(part) : part);
      },
      unit: width ? "" : "%",
    };
  });
  const show = (step) => {
    for (const chart of charts) {
      const x = chart.place(step) + chart.unit;
      chart.line.setAttribute("x1", x);
      chart.line.setAttribute("x2", x);
      chart.svg.append(chart.line);
      const texts = chart.values.map(([name, [steps, values]]) => {
        let best = 0;
        steps.forEach((one, index) => { if (Math.abs(one - step) < Math.abs(steps[best] - step)) best = index; });
        return `${name} ${values[best]}`;
      });
      chart.output.textContent = `step ${Math.round(step)}: ${texts.join(", ")}`;
    }
  };
  for (const chart of charts)
    for (const kind of ["pointermove", "pointerdown"]) chart.svg.addEventListener(kind, (event) => show(chart.step(event)));
})();
// The explorer of a plan: a budget, and the fastest configuration that fits in it.
for (const explorer of document.querySelectorAll(".explorer[data-plan]")) {
  const plan = JSON.parse(explorer.dataset.plan);
  const [slider, output] = [explorer.querySelector("input"), explorer.querySelector("output")];
  const svg = document.querySelector("svg[data-scale]");
  const [left, right, least, most] = JSON.parse(svg.dataset.scale);
  const rows = [...document.querySelectorAll("[data-rows=ways] tbody tr")];
  const show = (budget) => {
    const fits = plan.rows.filter((row) => row.peak <= budget && row.seconds !== null);
    // What was not taken though it may be faster is not taken here either, as long as what was chosen fits.
    const taken = fits.some((row) => row.index === plan.chosen) ? fits.filter((row) => !row.untaken) : fits;
    const best = taken.sort((a, b) => a.seconds - b.seconds || a.peak - b.peak)[0];
    output.textContent = best ? `${plan.text(budget)}: ${best.text}` : `${plan.text(budget)}: no configuration found fits`;
    rows.forEach((row, index) => row.classList.toggle("marked", Boolean(best) && index === best.index));
    svg.querySelectorAll("circle").forEach((dot, index) => {
      dot.classList.toggle("chosen", Boolean(best) && plan.rows[index] === plan.rows.find((row) => row.index === best.index));
      dot.classList.toggle("far", plan.rows[index].peak > budget);
    });
    const group = svg.querySelector(".budget");
    if (group) {
      group.setAttribute("transform", `translate(${left + (right - left) * Math.min(1, Math.max(0, (budget / plan.unit - least) / (most - least)))} 0)`);
      group.querySelector("text").textContent = plan.text(budget);
    }
  };
  plan.text = (budget) => `budget ${(budget / plan.unit).toPrecision(3)} ${plan.name}`;
  slider.addEventListener("input", () => show(Number(slider.value)));
  svg.querySelectorAll("circle").forEach((dot, index) => dot.addEventListener("click", () => {
    slider.value = plan.rows[index].peak;
    show(plan.rows[index].peak);
  }));
}
// Places of a chart that have details of their own: a row of texts for each.
for (const svg of document.querySelectorAll("svg[data-places]")) {
  const [left, right, count] = JSON.parse(svg.dataset.places);
  const list = svg.closest("figure").parentElement.querySelector("[data-details]");
  const details = JSON.parse(list.dataset.details);
  const line = document.createElementNS(svg.namespaceURI, "line");
  line.setAttribute("class", "cursor");
  line.setAttribute("y1", 0);
  line.setAttribute("y2", "100%");
  const show = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const index = Math.min(count - 1, Math.max(0, Math.floor(((x - left) / (right - left)) * count)));
    line.setAttribute("x1", left + ((right - left) * (index + 0.5)) / count);
    line.setAttribute("x2", left + ((right - left) * (index + 0.5)) / count);
    svg.append(line);
    list.replaceChildren(...details[index].map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    }));
  };
  for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, show);
}
