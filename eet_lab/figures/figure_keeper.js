// Stands unseen in a FigureBox and fires the window's resize event when the box gets another size, or is shown again.

const SETTLE_MS = 60;

function render({ el }) {
  el.style.display = "none";
  let size = "", timer = 0, frame = 0;
  const watch = new ResizeObserver((entries) => {
    const { width, height } = entries[entries.length - 1].contentRect, now = [width, height].map(Math.round).join();
    if (now === size) return;
    size = now;
    clearTimeout(timer);
    if (width) timer = setTimeout(() => window.dispatchEvent(new Event("resize")), SETTLE_MS);
  });
  function find() { // a view is rendered before it stands in the page
    const box = el.closest(".eet-figure-box");
    if (box) watch.observe(box);
    else frame = requestAnimationFrame(find);
  }
  find();
  return () => { watch.disconnect(); clearTimeout(timer); cancelAnimationFrame(frame); };
}

export default { render };
