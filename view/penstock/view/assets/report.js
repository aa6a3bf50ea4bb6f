// Draws the report's figures with plotly in the light or dark palette, and again when the reader's preference or a width changes.
(() => {
  const read = () => JSON.parse(document.getElementById("figures").textContent);
  let { figures, palettes } = read();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const placed = () => [...document.querySelectorAll("[data-figure]")];
  let places = placed();
  const options = { displaylogo: false, displayModeBar: false, doubleClick: "reset" };
  const widths = new Map();

  const painted = (figure, palette) =>
    JSON.parse(JSON.stringify(figure).replace(/var\(--([\w-]+)\)/g, (_, name) => palette[name]));

  // In a narrow place the legend takes several lines: the figure grows by them, so that the data keep their height.
  const grown = (figure, width) => {
    const entries = figure.data.filter((trace) => trace.showlegend !== false).length;
    if (figure.layout.showlegend && width < 480) figure.layout.height += 19 * (entries - 1);
    return figure;
  };

  const draw = (place, palette, width) => {
    const figure = grown(painted(figures[place.dataset.figure], palette), width);
    figure.layout.width = width;
    place.style.minHeight = `${figure.layout.height}px`;
    widths.set(place, width);
    Plotly.react(place, figure.data, figure.layout, options);
  };
  const show = (place) => draw(place, dark.matches ? palettes.dark : palettes.light, place.clientWidth);

  // A drawing changes its own height, so only a new width calls for another.
  const fit = (place) => { if (widths.get(place) !== place.clientWidth) show(place); };
  const room = new ResizeObserver((entries) => requestAnimationFrame(() => entries.forEach((entry) => fit(entry.target))));

  const watch = () => places.forEach((place) => { fit(place); room.observe(place); });
  dark.addEventListener("change", () => places.forEach(show));
  addEventListener("beforeprint", () => {
    room.disconnect();
    places.forEach((place) => draw(place, palettes.light, Math.min(place.clientWidth, 640)));
  });
  addEventListener("afterprint", () => { widths.clear(); watch(); });
  // A page that updates itself dispatches this event when it has new figures, or new places for them.
  document.addEventListener("figures", () => {
    ({ figures, palettes } = read());
    room.disconnect();
    places = placed();
    places.forEach((place) => widths.delete(place));
    watch();
  });
  watch();
})();
