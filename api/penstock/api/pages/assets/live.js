// Keeps a page up to date: messages of its stream make it reload itself, and only changed elements are replaced.
(() => {
  const PAUSE = 1000;
  const state = document.getElementById("connection");
  const show = (text, kind) => { if (state) { state.textContent = text; state.className = kind; } };

  // Changes `now` into `next`, and keeps every node that is the same, so that focus, selection and open details stay.
  const morph = (now, next) => {
    if (now.nodeType !== next.nodeType || now.nodeName !== next.nodeName || now.id !== next.id) return now.replaceWith(next);
    if (now.nodeType !== Node.ELEMENT_NODE) { if (now.data !== next.data) now.data = next.data; return; }
    if (now.dataset.figure !== undefined && now.dataset.figure === next.dataset.figure) return;
    if (now.isEqualNode(next) || now.dataset.keep !== undefined) return;
    for (const { name } of [...now.attributes]) {
      if (!next.hasAttribute(name) && name !== "open") now.removeAttribute(name);
    }
    for (const { name, value } of [...next.attributes]) {
      if (now.getAttribute(name) !== value) now.setAttribute(name, value);
    }
    const [old, fresh] = [[...now.childNodes], [...next.childNodes]];
    fresh.forEach((child, i) => (i < old.length ? morph(old[i], child) : now.append(child)));
    old.slice(fresh.length).forEach((child) => child.remove());
  };

  const putIn = (text) => {
    const next = new DOMParser().parseFromString(text, "text/html");
    document.title = next.title;
    morph(document.getElementById("main"), next.getElementById("main"));
    const [drawn, figures] = [document.getElementById("figures"), next.getElementById("figures")];
    if (figures && drawn && drawn.textContent !== figures.textContent) {
      drawn.textContent = figures.textContent;
      document.dispatchEvent(new Event("figures"));
    } else if (figures && !drawn) {
      document.body.append(figures, next.getElementById("drawers"));
    }
    watchCharts();
  };

  let asked = false, asking = false;
  const refresh = async () => {
    asked = true;
    if (asking || document.hidden) return;
    asking = true;
    while (asked && !document.hidden) {
      asked = false;
      try {
        const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
        if (answer.redirected) location.reload();
        if (answer.ok) putIn(await answer.text());
      } catch { /* the stream's error event reports a lost connection */ }
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
    }
    asking = false;
  };
  document.addEventListener("visibilitychange", () => { if (asked) refresh(); });
  document.addEventListener("acted", refresh);

  const listen = (url) => {
    const source = new EventSource(url);
    source.addEventListener("hello", () => { show("live", "good"); refresh(); });
    for (const kind of ["job", "event"]) source.addEventListener(kind, refresh);
    source.addEventListener("error", () => {
      show("connection lost, trying again", "bad");
      if (source.readyState === EventSource.CLOSED) setTimeout(() => listen(url), 3 * PAUSE);
    });
    addEventListener("pagehide", () => source.close());
  };

  // plotly is large: it is loaded once a chart becomes visible.
  let loaded;
  const load = (url) => new Promise((resolve, reject) => {
    const script = Object.assign(document.createElement("script"), { src: url, onload: resolve, onerror: reject });
    document.head.append(script);
  });
  const draw = () => {
    const { plotly, draw: drawer } = document.getElementById("drawers").dataset;
    loaded ??= load(plotly).then(() => load(drawer));
    loaded.then(() => document.dispatchEvent(new Event("figures")), () => {
      loaded = undefined;
      visibility.disconnect();  // the next update of the page observes the charts again
    });
  };
  const visibility = new IntersectionObserver((entries) => {
    if (!loaded && entries.some((entry) => entry.isIntersecting)) draw();
  }, { rootMargin: "300px" });
  const watchCharts = () => document.querySelectorAll("[data-figure]").forEach((place) => visibility.observe(place));

  watchCharts();
  if (document.body.dataset.stream) listen(document.body.dataset.stream);
})();
