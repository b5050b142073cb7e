// The tooltip of a plot: a heading and lines of label and value, beside the pointer and within the window.
window.overlapscope.tip = (area) => {
  const tip = document.getElementById("tip")

  function place({sx, sy}) {
    const box = area.getBoundingClientRect()
    const left = box.left + sx + 14
    const top = box.top + sy + 14
    const flipX = left + tip.offsetWidth > window.innerWidth - 8
    const flipY = top + tip.offsetHeight > window.innerHeight - 8
    tip.style.left = `${Math.max(4, flipX ? left - tip.offsetWidth - 28 : left)}px`
    tip.style.top = `${Math.max(4, flipY ? top - tip.offsetHeight - 28 : top)}px`
  }

  function fill(title, labels, values) {
    const element = (name, textContent, className = "") =>
      Object.assign(document.createElement(name), {textContent, className})
    const lines = Array.from(labels).flatMap((label, i) => [element("span", label, "label"), element("span", values[i])])
    tip.replaceChildren(element("strong", title), ...lines)
    tip.hidden = false
  }

  return {place, fill, hide: () => (tip.hidden = true)}
}
